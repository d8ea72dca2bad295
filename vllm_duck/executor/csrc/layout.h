// How one layer's experts lie in memory: what the packer writes and kernels read.
//
// Every weight matrix is [columns][k]: a column is one output, k runs over its dot
// product (gate, up: k = hidden; down: k = the shard's expert columns).
//
//   group    16 columns; its bytes are contiguous, 16 * k * element size of them.
//   segment  the part of k that shares one 128-wide scale block (4 tiles or fewer).
//   tile     16 columns x 32 k (the last tile of a segment may have 16 k).
//
// Inside a tile, 4 consecutive k ("a step") of one column sit side by side:
//   e4m3  [step][column] one dword, bytes k0 k2 k1 k3 from low to high. The low bytes
//         of its two 16-bit halves are the pair (k0, k1), the high bytes (k2, k3), so
//         two shifts make bf16 pairs in the order that AMX wants.
//   bf16  [step][pair][column] one dword: (k0, k1) and then (k2, k3).
// Gate and up of one group are interleaved by segment, so that a kernel which needs
// both reads one stream.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {

constexpr int kGroup = 16;
constexpr int kTileK = 32;
constexpr int kStepK = 4;
constexpr int kBlock = 128;
constexpr int kTilesPerSegment = kBlock / kTileK;

// e4m3 weights are decoded as value * 2^-8 (it saves an addition for each exponent);
// the packer puts the 2^8 into the scale. Both are exact.
constexpr float kScaleFix = 256.0f;

enum class Format { kE4m3, kBf16 };

constexpr int element_bytes(Format format) { return format == Format::kE4m3 ? 1 : 2; }

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The k axis of one matrix, cut where 128-wide scale blocks begin. `phase` is the
// position of k = 0 within its block.
struct KAxis {
  int length;
  int phase;

  int num_segments() const { return ceil_div(phase + length, kBlock); }
  int begin(int segment) const {
    int at = segment * kBlock - phase;
    return at < 0 ? 0 : at;
  }
  int end(int segment) const {
    int at = (segment + 1) * kBlock - phase;
    return at > length ? length : at;
  }

  // Activations are kept with each segment padded by zeros to whole tiles, so that a
  // tile of 32 never reaches into a neighbour.
  int padded_begin(int segment) const {
    int at = 0;
    for (int s = 0; s < segment; ++s)
      at += ceil_div(end(s) - begin(s), kTileK) * kTileK;
    return at;
  }
  int padded_length() const { return padded_begin(num_segments()); }
};

struct LayerShape {
  int num_experts;
  int hidden;
  int columns;
  int column_phase;  // of the shard's first column within its 128-wide scale block
  Format format;

  KAxis gate_up_axis() const { return {hidden, 0}; }
  KAxis down_axis() const { return {columns, column_phase}; }
  int act_stride() const { return down_axis().padded_length(); }
  // Where column group `group` lies in a row of activations.
  int act_offset(int group) const {
    int segment = (column_phase + group * kGroup) / kBlock;
    KAxis axis = down_axis();
    return axis.padded_begin(segment) + group * kGroup - axis.begin(segment);
  }
  int column_groups() const { return columns / kGroup; }
  int hidden_groups() const { return hidden / kGroup; }
  int column_blocks() const { return ceil_div(column_phase + columns, kBlock); }
  int hidden_blocks() const { return ceil_div(hidden, kBlock); }

  // Bytes of one group (of one matrix), and of all groups of one expert.
  size_t gate_group_bytes() const {
    return size_t(kGroup) * hidden * element_bytes(format);
  }
  size_t down_group_bytes() const {
    return size_t(kGroup) * columns * element_bytes(format);
  }
  size_t gate_up_bytes() const { return 2 * gate_group_bytes() * column_groups(); }
  size_t expert_bytes() const {
    return gate_up_bytes() + down_group_bytes() * hidden_groups();
  }
  // One byte for each (group, segment); see ExpertView.
  size_t gate_up_marks() const {
    return size_t(2) * column_groups() * gate_up_axis().num_segments();
  }
  size_t expert_marks() const {
    return gate_up_marks() + size_t(hidden_groups()) * down_axis().num_segments();
  }
  size_t expert_scales() const { return size_t(3) * column_blocks() * hidden_blocks(); }
};

// One expert, read-only. Marks say which tiles of a segment (bit t = tile t) hold a
// code with a zero exponent field (zeros and subnormals): the kernels decode all
// other tiles with the shorter sequence that is exact for normal numbers only.
struct ExpertView {
  const LayerShape* shape;
  const uint8_t* weights;
  const uint8_t* marks;
  const float* scales;  // gate [column block][hidden block], up, down [hidden][column]

  const uint8_t* gate_up(int group) const {
    return weights + 2 * shape->gate_group_bytes() * group;
  }
  const uint8_t* down(int group) const {
    return weights + shape->gate_up_bytes() + shape->down_group_bytes() * group;
  }
  // [segment][gate, up]
  const uint8_t* gate_up_marks(int group) const {
    return marks + size_t(2) * group * shape->gate_up_axis().num_segments();
  }
  const uint8_t* down_marks(int group) const {
    return marks + shape->gate_up_marks() +
           size_t(group) * shape->down_axis().num_segments();
  }
  const float* gate_scales(int group) const {
    int block = (shape->column_phase + group * kGroup) / kBlock;
    return scales + size_t(block) * shape->hidden_blocks();
  }
  const float* up_scales(int group) const {
    return gate_scales(group) + size_t(shape->column_blocks()) * shape->hidden_blocks();
  }
  const float* down_scales(int group) const {
    size_t blocks = size_t(shape->column_blocks()) * shape->hidden_blocks();
    return scales + 2 * blocks +
           size_t(group * kGroup / kBlock) * shape->column_blocks();
  }
};

}  // namespace duck
