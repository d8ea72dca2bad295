// How one layer's experts lie in memory: what the packer writes and kernels read.
// Within a matrix, as in simd/formats.h.
//
// Gate and up of one group are interleaved by segment, so that a kernel which needs
// both reads one stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/formats.h"

namespace duck {

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

// Of a group's first segment: gate, up, gate, up, ... or down.
template <Format kFormat>
SegmentCursor<kFormat> cursor_at(const ExpertView& expert, const uint8_t* weights,
                                 size_t entry) {
  return {weights, kFormat == Format::kE4m3 ? expert.marks + entry : nullptr,
          is_grouped(kFormat) ? expert.group_scales() + entry * kGroup : nullptr};
}
template <Format kFormat>
SegmentCursor<kFormat> gate_up_cursor(const ExpertView& expert, int group) {
  return cursor_at<kFormat>(expert, expert.gate_up(group),
                            expert.gate_up_entry(group, 0, 0));
}
template <Format kFormat>
SegmentCursor<kFormat> down_cursor(const ExpertView& expert, int group) {
  return cursor_at<kFormat>(expert, expert.down(group), expert.down_entry(group, 0));
}

}  // namespace duck
