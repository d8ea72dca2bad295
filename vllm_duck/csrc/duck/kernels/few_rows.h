// The decode regime: one to eight rows of an expert against weights streamed from
// memory. Every weight is decoded in registers and used for all rows at once, or for
// four of them where there are few registers.
// Include after the target pragma; S is a class of simd/.
#pragma once

#include "duck/kernels/kernel_table.h"
#include "simd/segment_dot.h"
#include "simd/silu.h"

namespace duck {
namespace {

template <class S, Format kFormat, int R>
void gate_up_few(const ExpertRows& rows, int first_row, int group,
                 const HiddenRows& hidden) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.gate_up_axis();
  auto cursor = gate_up_cursor<kFormat>(rows.expert, group);
  const float* block_scales[2] = {rows.expert.gate_up_block_scales(group, 0),
                                  rows.expert.gate_up_block_scales(group, 1)};
  Inputs<R> inputs;
  for (int r = 0; r < R; ++r) {
    int token = rows.tokens[first_row + r];
    inputs.x[r] = hidden.fp32 + size_t(token) * shape.hidden_size;
    inputs.unscale[r] = hidden.unscale[token];
  }
  alignas(64) float total[2][R][kGroup];
  for (auto& matrix : total) clear<S, R>(matrix);
  for (int s = 0, num_segments = axis.num_segments(); s < num_segments; ++s) {
    int k = axis.begin(s), num_k = axis.end(s) - k;
    for (int m = 0; m < 2; ++m) {
      segment_dot<S, kFormat, R>(cursor, num_k, block_scales[m] + s, inputs, k,
                                 total[m]);
      cursor.advance(num_k);
    }
  }
  uint16_t* act = rows.act + shape.act_offset(group);
  for (int r = 0; r < R; ++r)
    silu_mul_group(total[0][r], total[1][r],
                   act + size_t(first_row + r) * shape.act_stride());
}

// y += weight * total for one group.
template <class S>
inline void add_weighted_group(float weight, const float* total, float* y) {
  for (int i = 0; i < kGroup; i += S::kWidth)
    S::store(y + i,
             S::add(S::load(y + i), S::mul(S::broadcast(weight), S::load(total + i))));
}

// One group of down for rows first_row, first_row + 1, ..., whose activations are
// `inputs`. Returns the cursor of the next group.
template <class S, Format kFormat, int R>
SegmentCursor<kFormat> down_few(const ExpertRows& rows, int first_row,
                                SegmentCursor<kFormat> cursor, const KAxis& axis,
                                const float* block_scales, const Inputs<R>& inputs,
                                float* y, size_t y_stride) {
  alignas(64) float total[R][kGroup];
  clear<S, R>(total);
  int padded_k = 0;
  for (int s = 0, num_segments = axis.num_segments(); s < num_segments; ++s) {
    int num_k = axis.end(s) - axis.begin(s);
    segment_dot<S, kFormat, R>(cursor, num_k, block_scales + s, inputs, padded_k,
                               total);
    cursor.advance(num_k);
    padded_k += round_up(num_k, kTileK);
  }
  for (int r = 0; r < R; ++r)
    add_weighted_group<S>(rows.weights[first_row + r], total[r],
                          y + rows.tokens[first_row + r] * y_stride);
  return cursor;
}

template <class S, Format kFormat>
void gate_up_few_all(const ExpertRows& rows, int begin, int end,
                     const HiddenRows& hidden) {
  prefetch_beginning<S>(rows.expert.gate_up(begin));
  for (int group = begin; group < end; ++group)
    for_row_chunks<S>(rows.num_rows, [&](auto count, int first) {
      gate_up_few<S, kFormat, decltype(count)::value>(rows, first, group, hidden);
    });
}

template <class S, Format kFormat>
void down_few_all(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
                  float* act_fp32) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.down_axis();
  int stride = shape.act_stride(), column_blocks = shape.column_blocks();
  float unscale[kMaxFewRows];
  for (int r = 0; r < rows.num_rows; ++r)
    unscale[r] = widen<S, kFormat>(rows.act + size_t(r) * stride, stride,
                                   act_fp32 + size_t(r) * stride);
  const float* block_scales = rows.expert.down_block_scales(begin);
  auto cursor = down_cursor<kFormat>(rows.expert, begin);
  prefetch_beginning<S>(cursor.weights);
  for (int group = begin; group < end; ++group, y += kGroup) {
    auto next = cursor;
    for_row_chunks<S>(rows.num_rows, [&](auto count, int first) {
      constexpr int R = decltype(count)::value;
      Inputs<R> inputs;
      for (int r = 0; r < R; ++r) {
        inputs.x[r] = act_fp32 + size_t(first + r) * stride;
        inputs.unscale[r] = unscale[first + r];
      }
      next = down_few<S, kFormat, R>(rows, first, cursor, axis, block_scales, inputs, y,
                                     y_stride);
    });
    cursor = next;
    if ((group + 1) * kGroup % kScaleBlock == 0) block_scales += column_blocks;
  }
}

}  // namespace
}  // namespace duck
