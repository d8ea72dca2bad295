// How one layer's experts lie in memory: what the packer writes and kernels read.
//
// Every weight matrix is [columns][k]: a column is one output, k runs over its dot
// product (gate, up: k = hidden; down: k = the shard's expert columns).
//
//   group    16 columns; its bytes are contiguous, 16 * k * element size of them.
//   segment  the part of k that shares one scale block: 128 k or fewer, int4: 32.
//   tile     16 columns x 32 k (the last tile of a segment may have 16 k).
//
// e4m3 has a scale for each 128 columns x segment, int8 and int4 have one for each
// column x segment (their 128 or 32 k are called a group elsewhere), bf16 has none.
//
// Inside a tile, 4 consecutive k ("a step") of one column sit side by side:
//   e4m3  [step][column] one dword, bytes k0 k2 k1 k3 from low to high. The low bytes
//         of its two 16-bit halves are the pair (k0, k1), the high bytes (k2, k3), so
//         two shifts make bf16 pairs in the order that AMX wants.
//   int8  the same, each code plus 128.
//   int4  [2 steps][4 columns] 16 bytes: two bytes for each column and the first step,
//         then for the second. Bytes are k0 | k2 << 4 and k1 | k3 << 4, so that looking
//         nibbles up and interleaving bytes makes bf16 pairs.
//   bf16  [step][pair][column] one dword: (k0, k1) and then (k2, k3).
// Gate and up of one group are interleaved by segment, so that a kernel which needs
// both reads one stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/inline.h"
#include "simd/tile.h"

namespace duck {

constexpr int kStepK = 4;

// e4m3 weights are decoded as value * 2^-8 (it saves an addition for each exponent;
// AVX2 has another factor for some, see kInputScale, whose products are the same); the
// packer puts the 2^8 into the scale. Both are exact.
constexpr float kScaleFix = 256.0f;

// In the order of kernel.py's WEIGHT_FORMATS.
enum class Format { kE4m3, kBf16, kInt8, kInt4 };

// Bytes of n weights; n is a multiple of 16.
constexpr size_t packed_bytes(Format format, size_t n) {
  switch (format) {
    case Format::kBf16:
      return 2 * n;
    case Format::kInt4:
      return n / 2;
    default:
      return n;
  }
}

// The k of one scale are 2^this, where the format has scales.
constexpr int segment_shift(Format format) { return format == Format::kInt4 ? 5 : 7; }
constexpr int segment_tiles(Format format) {
  return (1 << segment_shift(format)) / kTileK;
}

// Whether each column has scales of its own.
constexpr bool is_grouped(Format format) {
  return format == Format::kInt8 || format == Format::kInt4;
}

// The k axis of one matrix, cut where scale blocks begin. `offset` is the position of
// k = 0 within its block.
struct KAxis {
  int length;
  int offset;
  int shift;  // kernels ask for positions all the time: no divisions

  KAxis(int length, int offset, Format format)
      : length(length),
        offset(offset % (1 << segment_shift(format))),
        shift(segment_shift(format)) {}

  int segment_of(int k) const { return (offset + k) >> shift; }
  int num_segments() const { return segment_of(length - 1) + 1; }
  int begin(int segment) const {
    int at = (segment << shift) - offset;
    return at < 0 ? 0 : at;
  }
  int end(int segment) const {
    int at = ((segment + 1) << shift) - offset;
    return at > length ? length : at;
  }

  // Activations are kept with each segment padded by zeros to whole tiles, so that a
  // tile of 32 never reaches into a neighbour.
  int padded_begin(int segment) const {
    int at = 0;
    for (int s = 0; s < segment; ++s) at += round_up(end(s) - begin(s), kTileK);
    return at;
  }
  int padded_length() const { return padded_begin(num_segments()); }
};

struct LayerShape {
  int num_experts;
  int hidden_size;
  int columns;
  int column_offset;  // of the shard's first column within its 128-wide scale block
  Format format;

  KAxis gate_up_axis() const { return {hidden_size, 0, format}; }
  KAxis down_axis() const { return {columns, column_offset, format}; }
  int act_stride() const { return down_axis().padded_length(); }
  // Where column group `group` lies in a row of activations.
  int act_offset(int group) const {
    KAxis axis = down_axis();
    int segment = axis.segment_of(group * kGroup);
    return axis.padded_begin(segment) + group * kGroup - axis.begin(segment);
  }
  int column_groups() const { return columns / kGroup; }
  int hidden_groups() const { return hidden_size / kGroup; }
  int column_blocks() const { return ceil_div(column_offset + columns, kScaleBlock); }
  int hidden_blocks() const { return ceil_div(hidden_size, kScaleBlock); }

  // Bytes of one group (of one matrix), and of all groups of one expert.
  size_t gate_group_bytes() const {
    return packed_bytes(format, size_t(kGroup) * hidden_size);
  }
  size_t down_group_bytes() const {
    return packed_bytes(format, size_t(kGroup) * columns);
  }
  size_t gate_up_bytes() const { return 2 * gate_group_bytes() * column_groups(); }
  DUCK_INLINE size_t weight_bytes() const {
    return gate_up_bytes() + down_group_bytes() * hidden_groups();
  }
  // One entry for each (group, segment) of an expert.
  DUCK_INLINE size_t gate_up_entries() const {
    return size_t(2) * column_groups() * gate_up_axis().num_segments();
  }
  size_t entries() const {
    return gate_up_entries() + size_t(hidden_groups()) * down_axis().num_segments();
  }
  // bf16 scales for each column of a group; they lie behind the weights.
  size_t group_scale_bytes() const {
    return is_grouped(format) ? entries() * kGroup * sizeof(uint16_t) : 0;
  }
  size_t expert_bytes() const {
    return (weight_bytes() + group_scale_bytes() + 63) / 64 * 64;
  }
  size_t expert_marks() const { return format == Format::kE4m3 ? entries() : 0; }
  size_t expert_scales() const {
    if (format != Format::kE4m3) return 0;
    return size_t(3) * column_blocks() * hidden_blocks();
  }
};

// What the sum over one segment is multiplied with, for the 16 columns of a group: one
// fp32 number (`columns` is null), or 16 in bf16.
struct SegmentScale {
  float block;
  const uint16_t* columns;
};

// One expert, read-only. Marks say which tiles of a segment (bit t = tile t) hold a
// code with a zero exponent field (zeros and subnormals): the kernels decode what has
// none with the shorter sequence that is exact for normal numbers only.
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
  // Zero for the formats without marks. `matrix` 0 is gate, 1 is up.
  DUCK_INLINE unsigned gate_up_mark(int group, int segment, int matrix) const {
    if (shape->format != Format::kE4m3) return 0;
    return marks[gate_up_entry(group, segment, matrix)];
  }
  DUCK_INLINE unsigned down_mark(int group, int segment) const {
    return shape->format == Format::kE4m3 ? marks[down_entry(group, segment)] : 0;
  }
  DUCK_INLINE SegmentScale gate_up_scale(int group, int segment, int matrix) const {
    if (shape->format == Format::kBf16) return {1.0f, nullptr};
    if (is_grouped(shape->format))
      return {0, group_scales() + gate_up_entry(group, segment, matrix) * kGroup};
    return {gate_up_block_scales(group, matrix)[segment], nullptr};
  }
  DUCK_INLINE SegmentScale down_scale(int group, int segment) const {
    if (shape->format == Format::kBf16) return {1.0f, nullptr};
    if (is_grouped(shape->format))
      return {0, group_scales() + down_entry(group, segment) * kGroup};
    return {down_block_scales(group)[segment], nullptr};
  }

  // What gate_up_scale() and down_scale() take their number from: [segment].
  DUCK_INLINE const float* gate_up_block_scales(int group, int matrix) const {
    int block = (shape->column_offset + group * kGroup) / kScaleBlock;
    int row = matrix * shape->column_blocks() + block;
    return scales + size_t(row) * shape->hidden_blocks();
  }
  DUCK_INLINE const float* down_block_scales(int group) const {
    size_t blocks = size_t(shape->column_blocks()) * shape->hidden_blocks();
    size_t row = size_t(group * kGroup / kScaleBlock) * shape->column_blocks();
    return scales + 2 * blocks + row;
  }

  // [column group][segment][gate, up]
  DUCK_INLINE size_t gate_up_entry(int group, int segment, int matrix) const {
    int segments = shape->gate_up_axis().num_segments();
    return (size_t(group) * segments + segment) * 2 + matrix;
  }
  // [hidden group][segment]
  DUCK_INLINE size_t down_entry(int group, int segment) const {
    int segments = shape->down_axis().num_segments();
    return shape->gate_up_entries() + size_t(group) * segments + segment;
  }
  // [entry][16]
  DUCK_INLINE const uint16_t* group_scales() const {
    return reinterpret_cast<const uint16_t*>(weights + shape->weight_bytes());
  }
};

// Where the kernel is in one expert's weights. Segments lie in memory in the order in
// which they are used, so that each is reached from the one before by additions: to ask
// ExpertView for each would take longer than to multiply a short one.
template <Format kFormat>
struct SegmentCursor {
  const uint8_t* weights;
  const uint8_t* marks;
  const uint16_t* column_scales;

  // Of a group's first segment: gate, up, gate, up, ... or down.
  static SegmentCursor gate_up(const ExpertView& expert, int group) {
    return at(expert, expert.gate_up(group), expert.gate_up_entry(group, 0, 0));
  }
  static SegmentCursor down(const ExpertView& expert, int group) {
    return at(expert, expert.down(group), expert.down_entry(group, 0));
  }

  DUCK_INLINE unsigned mark() const { return kFormat == Format::kE4m3 ? *marks : 0; }
  // `block` is where the number of an e4m3 segment is.
  DUCK_INLINE SegmentScale scale(const float* block) const {
    if (kFormat == Format::kBf16) return {1.0f, nullptr};
    if (is_grouped(kFormat)) return {0, column_scales};
    return {*block, nullptr};
  }
  DUCK_INLINE void advance(int num_k) {
    weights += packed_bytes(kFormat, kGroup * num_k);
    if (kFormat == Format::kE4m3) ++marks;
    if (is_grouped(kFormat)) column_scales += kGroup;
  }

 private:
  static SegmentCursor at(const ExpertView& expert, const uint8_t* weights,
                          size_t entry) {
    return {weights, kFormat == Format::kE4m3 ? expert.marks + entry : nullptr,
            is_grouped(kFormat) ? expert.group_scales() + entry * kGroup : nullptr};
  }
};

}  // namespace duck
