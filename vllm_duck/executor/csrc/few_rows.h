// The decode regime: one to eight rows of an expert against weights streamed from
// memory. Every weight is decoded in registers and used for all rows at once, or for
// four of them where there are few registers.
// Include after the target pragma; S is one of the simd_*.h.
#pragma once

#include "kernel.h"
#include "silu.h"

namespace duck {
namespace {

constexpr int kMaxFewRows = 8;

// Each row has two sums for each vector of columns.
template <class S>
constexpr int kMaxRowsAtOnce = S::kRegisters >= 32 ? 8 : 4;

// Weights are fetched into the L2 cache well ahead and into the L1 cache shortly before
// use. Measured on a Xeon: the far one brings a fifth more bandwidth, because a core
// has many more requests open from L2 to memory than from L1 to L2, and the hardware's
// own prefetcher stops at each 4 KiB page.
constexpr int kNearBytes = 1024;
constexpr int kFarBytes = 8192;

template <class S>
DUCK_INLINE void prefetch_line(const uint8_t* at) {
  S::prefetch(at + kNearBytes);
  S::prefetch_far(at + kFarBytes);
}

// What is decoded at once: k for each of the 16 columns.
constexpr int unit_k(Format format) {
  return format == Format::kInt4 ? 2 * kStepK : kStepK;
}

template <class S, Format kFormat, bool kAnyZeroExponent>
inline void decode_unit(const uint8_t* tile, int unit, int column,
                        typename S::F w[unit_k(kFormat)]) {
  const uint8_t* at = tile + (unit * kGroup + column) * 4;
  if constexpr (kFormat == Format::kE4m3) {
    S::template decode_e4m3<kAnyZeroExponent>(at, w);
  } else if constexpr (kFormat == Format::kInt8) {
    S::decode_int8(at, w);
  } else if constexpr (kFormat == Format::kInt4) {
    S::decode_int4(at, w);
  } else {
    S::decode_bf16(tile + (unit * 2 * kGroup + column) * 4, w);
    S::decode_bf16(tile + ((unit * 2 + 1) * kGroup + column) * 4, w + 2);
  }
}

template <class S, Format kFormat>
DUCK_INLINE void prefetch_unit(const uint8_t* tile, int unit) {
  constexpr int kBytes = packed_bytes(kFormat, kGroup * unit_k(kFormat));
  for (int at = 0; at < kBytes; at += 64) prefetch_line<S>(tile + unit * kBytes + at);
}

// The scale of columns from `column` on.
template <class S, Format kFormat>
inline typename S::F scale_at(const SegmentScale& scale, int column) {
  if constexpr (is_grouped(kFormat))
    return S::load_bf16(scale.columns + column);
  else
    return S::broadcast(scale.block);
}

// acc[r][i] += tile . x[r], for lanes i of the columns from `column` on and for kTiles
// tiles one after the other: their products do not wait for each other.
template <class S, Format kFormat, int R, int kVectors, bool kAnyZeroExponent,
          int kNumK, int kTiles>
inline void tile_dot(const uint8_t* tile, int column, const float* const x[], int k,
                     typename S::F acc[R][kVectors]) {
  constexpr int kUnitK = unit_k(kFormat);
  constexpr int kTileBytes = packed_bytes(kFormat, kGroup * kTileK);
  typename S::F even[kTiles][R][kVectors], odd[kTiles][R][kVectors];
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) even[t][r][v] = odd[t][r][v] = S::zero();
#pragma GCC unroll 8
  for (int unit = 0; unit < kNumK / kUnitK; ++unit) {
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* at = tile + t * kTileBytes;
      if (column == 0) prefetch_unit<S, kFormat>(at, unit);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename S::F w[kUnitK];
        decode_unit<S, kFormat, kAnyZeroExponent>(at, unit, column + v * S::kLanes, w);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const float* from = x[r] + k + t * kTileK + unit * kUnitK;
#pragma GCC unroll 4
          for (int i = 0; i < kUnitK; i += 2) {
            even[t][r][v] =
                S::add_exact_product(w[i], S::broadcast_from(from + i), even[t][r][v]);
            odd[t][r][v] = S::add_exact_product(
                w[i + 1], S::broadcast_from(from + i + 1), odd[t][r][v]);
          }
        }
      }
    }
  }
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = S::add(acc[r][v], S::add(even[t][r][v], odd[t][r][v]));
}

// total[r][group] += scale * (segment . x[r]) for one group of 16 columns.
template <class S, Format kFormat, int R>
inline void segment_dot(const uint8_t* segment, int num_k, unsigned mark,
                        const SegmentScale& scale, const float* const x[], int k,
                        float total[R][kGroup]) {
  constexpr int kVectors = R <= 2 && S::kLanes < kGroup ? 2 : 1;
  constexpr int kTiles = R <= 2 && S::kRegisters >= 32 ? 2 : 1;
  constexpr int kTileBytes = packed_bytes(kFormat, kGroup * kTileK);
  for (int column = 0; column < kGroup; column += kVectors * S::kLanes) {
    typename S::F acc[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = S::zero();
    const uint8_t* tile = segment;
    int num_full = num_k / kTileK;
    for (int t = 0; t < num_full; ++t, tile += kTileBytes) {
      int at = k + t * kTileK;
      unsigned marks = mark >> t;
      if (kTiles == 2 && t + 1 < num_full && (marks & 3) == 0) {
        tile_dot<S, kFormat, R, kVectors, false, kTileK, kTiles>(tile, column, x, at,
                                                                 acc);
        ++t, tile += kTileBytes;
      } else if (marks & 1) {
        tile_dot<S, kFormat, R, kVectors, true, kTileK, 1>(tile, column, x, at, acc);
      } else {
        tile_dot<S, kFormat, R, kVectors, false, kTileK, 1>(tile, column, x, at, acc);
      }
    }
    if (num_k % kTileK != 0)
      tile_dot<S, kFormat, R, kVectors, true, kTileK / 2, 1>(
          tile, column, x, k + num_full * kTileK, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) {
        int at = column + v * S::kLanes;
        float* out = total[r] + at;
        typename S::F scaled = S::mul(scale_at<S, kFormat>(scale, at), acc[r][v]);
        S::store(out, S::add(S::load(out), scaled));
      }
  }
}

template <class S, Format kFormat, int R>
void gate_up_few(const ExpertRows& rows, int first_row, int group,
                 const HiddenRows& hidden) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.gate_up_axis();
  const uint8_t* weights = rows.expert.gate_up(group);
  const float* x[R];
  for (int r = 0; r < R; ++r)
    x[r] = hidden.fp32 + size_t(rows.tokens[first_row + r]) * shape.hidden;
  alignas(64) float total[2][R][kGroup] = {};
  for (int s = 0; s < axis.num_segments(); ++s) {
    int k = axis.begin(s), num_k = axis.end(s) - k;
    for (int m = 0; m < 2; ++m) {
      segment_dot<S, kFormat, R>(weights, num_k, rows.expert.gate_up_mark(group, s, m),
                                 rows.expert.gate_up_scale(group, s, m), x, k,
                                 total[m]);
      weights += packed_bytes(kFormat, kGroup * num_k);
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
  alignas(64) float total[R][kGroup] = {};
  for (int s = 0; s < axis.num_segments(); ++s) {
    int k = axis.begin(s), num_k = axis.end(s) - k;
    segment_dot<S, kFormat, R>(weights, num_k, rows.expert.down_mark(group, s),
                               rows.expert.down_scale(group, s), x,
                               axis.padded_begin(s), total);
    weights += packed_bytes(kFormat, kGroup * num_k);
  }
  for (int r = 0; r < R; ++r) {
    float* out = y + rows.tokens[first_row + r] * y_stride;
    float weight = rows.weights[first_row + r];
    add_weighted_group<S>(weight, total[r], out);
  }
}

// Calls body(integral constant R, first row) over all rows in chunks.
template <class S, class Body>
inline void for_row_chunks(int num_rows, const Body& body) {
  int first = 0;
  if constexpr (kMaxRowsAtOnce<S> == 8)
    for (; num_rows - first >= 8; first += 8)
      body(std::integral_constant<int, 8>(), first);
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
    for_row_chunks<S>(rows.num_rows, [&](auto count, int first) {
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
    for_row_chunks<S>(rows.num_rows, [&](auto count, int first) {
      constexpr int R = decltype(count)::value;
      const float* x[R];
      for (int r = 0; r < R; ++r) x[r] = act_fp32 + size_t(first + r) * stride;
      down_few<S, kFormat, R>(rows, first, group, x, y, y_stride);
    });
}

}  // namespace
}  // namespace duck
