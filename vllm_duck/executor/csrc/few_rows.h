// The decode regime: one to four rows of an expert against weights streamed from
// memory. Every weight is decoded in registers and used for all rows at once.
// Include after the target pragma; S is one of the simd_*.h.
#pragma once

#include "kernel.h"
#include "silu.h"

namespace duck {
namespace {

constexpr int kMaxFewRows = 4;

// Weights are fetched into the L2 cache well ahead and into the L1 cache shortly before
// use. Measured on a Xeon: the far one brings a fifth more bandwidth, because a core
// has many more requests open from L2 to memory than from L1 to L2, and the hardware's
// own prefetcher stops at each 4 KiB page.
constexpr int kNearBytes = 1024;
constexpr int kFarBytes = 8192;

template <class S>
inline void prefetch_line(const uint8_t* at) {
  S::prefetch(at + kNearBytes);
  S::prefetch_far(at + kFarBytes);
}

template <class S, Format kFormat, bool kAnyZeroExponent>
inline void decode_step(const uint8_t* tile, int step, int column, typename S::F w[4]) {
  if constexpr (kFormat == Format::kE4m3) {
    S::template decode_e4m3<kAnyZeroExponent>(tile + (step * kGroup + column) * 4, w);
  } else {
    S::decode_bf16(tile + (step * 2 * kGroup + column) * 4, w);
    S::decode_bf16(tile + ((step * 2 + 1) * kGroup + column) * 4, w + 2);
  }
}

template <class S, Format kFormat>
inline void prefetch_step(const uint8_t* tile, int step) {
  constexpr int kStepBytes = kGroup * kStepK * element_bytes(kFormat);
  for (int at = 0; at < kStepBytes; at += 64)
    prefetch_line<S>(tile + step * kStepBytes + at);
}

// acc[r][i] += tile . x[r], for lanes i of the columns from `column` on.
template <class S, Format kFormat, int R, int kVectors, bool kAnyZeroExponent,
          int kSteps>
inline void tile_dot(const uint8_t* tile, int column, const float* const x[], int k,
                     typename S::F acc[R][kVectors]) {
  typename S::F even[R][kVectors], odd[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = S::zero();
#pragma GCC unroll 8
  for (int step = 0; step < kSteps; ++step) {
    if (column == 0) prefetch_step<S, kFormat>(tile, step);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      typename S::F w[4];
      decode_step<S, kFormat, kAnyZeroExponent>(tile, step, column + v * S::kLanes, w);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float* at = x[r] + k + step * kStepK;
        even[r][v] = S::add_exact_product(w[0], S::broadcast(at[0]), even[r][v]);
        odd[r][v] = S::add_exact_product(w[1], S::broadcast(at[1]), odd[r][v]);
        even[r][v] = S::add_exact_product(w[2], S::broadcast(at[2]), even[r][v]);
        odd[r][v] = S::add_exact_product(w[3], S::broadcast(at[3]), odd[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = S::add(acc[r][v], S::add(even[r][v], odd[r][v]));
}

// total[r][group] += scale * (segment . x[r]) for one group of 16 columns.
template <class S, Format kFormat, int R>
inline void segment_dot(const uint8_t* segment, int num_k, unsigned mark, float scale,
                        const float* const x[], int k, float total[R][kGroup]) {
  constexpr int kVectors = R <= 2 && S::kLanes < kGroup ? 2 : 1;
  constexpr int kTileBytes = kGroup * kTileK * element_bytes(kFormat);
  for (int column = 0; column < kGroup; column += kVectors * S::kLanes) {
    typename S::F acc[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = S::zero();
    const uint8_t* tile = segment;
    int num_full = num_k / kTileK;
    for (int t = 0; t < num_full; ++t, tile += kTileBytes) {
      int at = k + t * kTileK;
      if (mark >> t & 1)
        tile_dot<S, kFormat, R, kVectors, true, 8>(tile, column, x, at, acc);
      else
        tile_dot<S, kFormat, R, kVectors, false, 8>(tile, column, x, at, acc);
    }
    if (num_k % kTileK != 0)
      tile_dot<S, kFormat, R, kVectors, true, 4>(tile, column, x, k + num_full * kTileK,
                                                 acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) {
        float* out = total[r] + column + v * S::kLanes;
        S::store(out, S::add(S::load(out), S::mul(S::broadcast(scale), acc[r][v])));
      }
  }
}

template <class S, Format kFormat, int R>
void gate_up_few(const ExpertRows& rows, int first_row, int group,
                 const HiddenRows& hidden) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.gate_up_axis();
  const uint8_t* weights = rows.expert.gate_up(group);
  const uint8_t* marks = rows.expert.gate_up_marks(group);
  const float* scales[2] = {rows.expert.gate_scales(group),
                            rows.expert.up_scales(group)};
  const float* x[R];
  for (int r = 0; r < R; ++r)
    x[r] = hidden.fp32 + size_t(rows.tokens[first_row + r]) * shape.hidden;
  alignas(64) float total[2][R][kGroup] = {};
  for (int s = 0; s < axis.num_segments(); ++s) {
    int k = axis.begin(s), num_k = axis.end(s) - k;
    for (int m = 0; m < 2; ++m) {
      segment_dot<S, kFormat, R>(weights, num_k, marks[2 * s + m], scales[m][s], x, k,
                                 total[m]);
      weights += kGroup * num_k * element_bytes(kFormat);
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
  for (int i = 0; i < kGroup; i += S::kLanes)
    S::store(y + i,
             S::add(S::load(y + i), S::mul(S::broadcast(weight), S::load(total + i))));
}

// `x` holds fp32 copies of the activations of rows first_row, first_row + 1, ...
template <class S, Format kFormat, int R>
void down_few(const ExpertRows& rows, int first_row, int group, const float* const x[],
              float* y, size_t y_stride) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.down_axis();
  const uint8_t* weights = rows.expert.down(group);
  const uint8_t* marks = rows.expert.down_marks(group);
  const float* scales = rows.expert.down_scales(group);
  alignas(64) float total[R][kGroup] = {};
  for (int s = 0; s < axis.num_segments(); ++s) {
    int k = axis.begin(s), num_k = axis.end(s) - k;
    segment_dot<S, kFormat, R>(weights, num_k, marks[s], scales[s], x,
                               axis.padded_begin(s), total);
    weights += kGroup * num_k * element_bytes(kFormat);
  }
  for (int r = 0; r < R; ++r) {
    float* out = y + rows.tokens[first_row + r] * y_stride;
    float weight = rows.weights[first_row + r];
    add_weighted_group<S>(weight, total[r], out);
  }
}

// Calls body(integral constant R, first row) over all rows in chunks of kMaxFewRows.
template <class Body>
inline void for_row_chunks(int num_rows, const Body& body) {
  int first = 0;
  for (; num_rows - first >= 4; first += 4)
    body(std::integral_constant<int, 4>(), first);
  switch (num_rows - first) {
    case 3:
      return body(std::integral_constant<int, 3>(), first);
    case 2:
      return body(std::integral_constant<int, 2>(), first);
    case 1:
      return body(std::integral_constant<int, 1>(), first);
  }
}

template <class S, Format kFormat>
void gate_up_few_all(const ExpertRows& rows, int begin, int end,
                     const HiddenRows& hidden) {
  for (int group = begin; group < end; ++group)
    for_row_chunks(rows.num_rows, [&](auto count, int first) {
      gate_up_few<S, kFormat, decltype(count)::value>(rows, first, group, hidden);
    });
}

template <class S, Format kFormat>
void down_few_all(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
                  float* act_fp32) {
  int stride = rows.expert.shape->act_stride();
  for (size_t i = 0; i < size_t(rows.num_rows) * stride; ++i)
    act_fp32[i] = bf16_to_float(rows.act[i]);
  for (int group = begin; group < end; ++group, y += kGroup)
    for_row_chunks(rows.num_rows, [&](auto count, int first) {
      constexpr int R = decltype(count)::value;
      const float* x[R];
      for (int r = 0; r < R; ++r) x[r] = act_fp32 + size_t(first + r) * stride;
      down_few<S, kFormat, R>(rows, first, group, x, y, y_stride);
    });
}

}  // namespace
}  // namespace duck
