// One to eight rows times weights streamed from memory, segment by segment. Every
// weight is decoded in registers and used for all rows at once, or for four of them
// where there are few registers. The order of additions:
//   tile     over 32 k: e = sum of the even k, o = sum of the odd k, each an fp32 chain
//            in rising k that starts at 0.
//   segment  acc = acc + (e + o), tile after tile.
//   dot      total = total + scale * acc, segment after segment, product rounded.
// Include after the target pragma of the source that uses it; S is a class of simd/.
#pragma once

#include <type_traits>

#include "simd/bf16.h"
#include "simd/formats.h"

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

// What the far prefetches of a stream of weights leave out: its beginning.
template <class S>
DUCK_INLINE void prefetch_beginning(const uint8_t* weights) {
  for (int at = 0; at < kFarBytes; at += 64) S::prefetch_far(weights + at);
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

// fp32 copies of a row's activations; for e4m3 times S::kInputScale, which is 1 but for
// AVX2. Returns the factor that takes the scaling back: 1 if there is none, as in a row
// where it would overflow.
template <class S, Format kFormat>
float widen(const uint16_t* from, size_t num, float* to) {
  float scale = 1;
  if constexpr (kFormat == Format::kE4m3 && S::kInputScale != 1) {
    unsigned largest = 0;
    for (size_t i = 0; i < num; ++i) {
      unsigned magnitude = from[i] & 0x7fffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    constexpr unsigned kLimit = (127 + 15) << 7;  // 2^15
    if (largest < kLimit) scale = S::kInputScale;
  }
  for (size_t i = 0; i < num; ++i) to[i] = bf16_to_float(from[i]) * scale;
  return 1 / scale;
}

// Rows of activations as widen() makes them.
template <int R>
struct Inputs {
  const float* x[R];
  float unscale[R];

  // Whether weights must be decoded to their usual size.
  template <class S, Format kFormat>
  bool any_unscaled() const {
    bool any = false;
    if (kFormat == Format::kE4m3 && S::kInputScale != 1)
      for (float factor : unscale) any |= factor == 1;
    return any;
  }
};

// One activation for all columns. Weights of decode_e4m3<true> have their usual size.
template <class S, Format kFormat, bool kAnyZeroExponent>
inline typename S::F input_at(const float* at, float unscale) {
  typename S::F value = S::broadcast_from(at);
  if constexpr (kFormat == Format::kE4m3 && kAnyZeroExponent && S::kInputScale != 1)
    value = S::mul(value, S::broadcast(unscale));
  return value;
}

// even[r], odd[r] += unit . x[r] for one vector of columns.
template <class S, Format kFormat, int R, int kVectors, bool kAnyZeroExponent>
DUCK_INLINE void unit_dot(const uint8_t* tile, int unit, int column, int v,
                          const Inputs<R>& inputs, int k,
                          typename S::F (&even)[R][kVectors],
                          typename S::F (&odd)[R][kVectors]) {
  constexpr int kUnitK = unit_k(kFormat);
  typename S::F w[kUnitK];
  decode_unit<S, kFormat, kAnyZeroExponent>(tile, unit, column, w);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const float* from = inputs.x[r] + k + unit * kUnitK;
#pragma GCC unroll 4
    for (int i = 0; i < kUnitK; i += 2) {
      auto first = input_at<S, kFormat, kAnyZeroExponent>(from + i, inputs.unscale[r]);
      even[r][v] = S::add_exact_product(w[i], first, even[r][v]);
      auto second =
          input_at<S, kFormat, kAnyZeroExponent>(from + i + 1, inputs.unscale[r]);
      odd[r][v] = S::add_exact_product(w[i + 1], second, odd[r][v]);
    }
  }
}

// acc[r][i] += tile . x[r], for the columns i from `column` on and for kTiles
// tiles one after the other: their products do not wait for each other. Of marked
// tiles, few units hold a zero exponent, unless all are to be taken for such.
template <class S, Format kFormat, int R, int kVectors, bool kMarked, int kNumK,
          int kTiles>
inline void tile_dot(const uint8_t* tile, int column, const Inputs<R>& inputs,
                     bool takes_all, int k, typename S::F acc[R][kVectors]) {
  constexpr int kUnits = kNumK / unit_k(kFormat);
  constexpr int kTileBytes = packed_bytes(kFormat, kGroup * kTileK);
  typename S::F even[kTiles][R][kVectors], odd[kTiles][R][kVectors];
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) even[t][r][v] = odd[t][r][v] = S::zero();
#pragma GCC unroll 8
  for (int unit = 0; unit < kUnits; ++unit) {
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* at = tile + t * kTileBytes;
      if (column == 0) prefetch_unit<S, kFormat>(at, unit);
      keep_order();
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        int first = column + v * S::kWidth, from_k = k + t * kTileK;
        if (kMarked &&
            (takes_all || S::any_zero_exponent(at + (unit * kGroup + first) * 4)))
          unit_dot<S, kFormat, R, kVectors, true>(at, unit, first, v, inputs, from_k,
                                                  even[t], odd[t]);
        else
          unit_dot<S, kFormat, R, kVectors, false>(at, unit, first, v, inputs, from_k,
                                                   even[t], odd[t]);
      }
    }
  }
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = S::add(acc[r][v], S::add(even[t][r][v], odd[t][r][v]));
}

// total[r] += scale * (segment . x[r]) for one group of 16 columns. A function of its
// own for segments with marked tiles: with both in one, g++ runs out of registers.
template <class S, Format kFormat, int R, bool kMarked>
__attribute__((noinline)) void segment_dot_as(const SegmentCursor<kFormat>& cursor,
                                              int num_k, const float* block_scale,
                                              const Inputs<R>& inputs, int k,
                                              float total[R][kGroup]) {
  constexpr int kVectors = R <= 2 && S::kWidth < kGroup ? 2 : 1;
  constexpr int kPair = R <= 2 && S::kRegisters >= 32 ? 2 : 1;
  constexpr int kTileBytes = packed_bytes(kFormat, kGroup * kTileK);
  SegmentScale scale = cursor.scale(block_scale);
  bool takes_all = kMarked && inputs.template any_unscaled<S, kFormat>();
  for (int column = 0; column < kGroup; column += kVectors * S::kWidth) {
    typename S::F acc[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = S::zero();
    const uint8_t* tile = cursor.weights;
    int at = k, left = num_k;
    for (; left >= kPair * kTileK; left -= kPair * kTileK) {
      tile_dot<S, kFormat, R, kVectors, kMarked, kTileK, kPair>(tile, column, inputs,
                                                                takes_all, at, acc);
      at += kPair * kTileK, tile += kPair * kTileBytes;
    }
    if (left >= kTileK) {
      tile_dot<S, kFormat, R, kVectors, kMarked, kTileK, 1>(tile, column, inputs,
                                                            takes_all, at, acc);
      at += kTileK, left -= kTileK, tile += kTileBytes;
    }
    if (left > 0)
      tile_dot<S, kFormat, R, kVectors, kMarked, kTileK / 2, 1>(tile, column, inputs,
                                                                takes_all, at, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) {
        int first = column + v * S::kWidth;
        float* out = total[r] + first;
        typename S::F scaled = S::mul(scale_at<S, kFormat>(scale, first), acc[r][v]);
        S::store(out, S::add(S::load(out), scaled));
      }
  }
}

template <class S, Format kFormat, int R>
inline void segment_dot(const SegmentCursor<kFormat>& cursor, int num_k,
                        const float* block_scale, const Inputs<R>& inputs, int k,
                        float total[R][kGroup]) {
  if (kFormat == Format::kE4m3 &&
      (cursor.mark() != 0 || inputs.template any_unscaled<S, kFormat>()))
    segment_dot_as<S, kFormat, R, kFormat == Format::kE4m3>(cursor, num_k, block_scale,
                                                            inputs, k, total);
  else
    segment_dot_as<S, kFormat, R, false>(cursor, num_k, block_scale, inputs, k, total);
}

// g++ would write `= {}` as `rep stos`, which takes as long as a third of a segment.
template <class S, int R>
DUCK_INLINE void clear(float total[R][kGroup]) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kGroup; i += S::kWidth) S::store(&total[r][i], S::zero());
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

}  // namespace
}  // namespace duck
