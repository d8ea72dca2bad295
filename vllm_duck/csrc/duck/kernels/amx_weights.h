// Packed weights -> bf16 tiles that the tile unit can load.
#pragma once

#include <cstring>

#include "duck/kernels/few_rows.h"
#include "duck/kernels/kernel_table.h"
#include "simd/amx_tiles.h"
#include "simd/avx512.h"

namespace duck {
namespace {

// Of the longest segment of any format.
constexpr int kSegmentTileBytes = kScaleBlock / kTileK * kTileBytes;

// One 64-byte line of weights -> lines of bf16 pairs.
template <Format kFormat, bool kAnyZeroExponent>
DUCK_INLINE void decode_line(const uint8_t* at, __m512i pairs[4]) {
  if constexpr (kFormat == Format::kE4m3)
    Avx512Simd::decode_e4m3_pairs<kAnyZeroExponent>(at, pairs);
  else if constexpr (kFormat == Format::kInt8)
    Avx512Simd::decode_int8_pairs(at, pairs);
  else
    Avx512Simd::decode_int4_pairs(at, pairs);
}

template <Format kFormat, bool kAnyZeroExponent, int kNumK>
DUCK_INLINE void convert_k(const uint8_t* source, const uint8_t* prefetch,
                           uint8_t* tile) {
  constexpr int kLines = int(packed_bytes(kFormat, kNumK * kGroup)) / 64;
  constexpr int kLinesOut = kNumK * kGroup * 2 / 64 / kLines;
#pragma GCC unroll 8
  for (int line = 0; line < kLines; ++line) {
    prefetch_line<Avx512Simd>(prefetch + line * 64);
    keep_order();
    __m512i pairs[4];
    decode_line<kFormat, kAnyZeroExponent>(source + line * 64, pairs);
#pragma GCC unroll 4
    for (int i = 0; i < kLinesOut; ++i)
      _mm512_store_si512(tile + (line * kLinesOut + i) * 64, pairs[i]);
  }
}

// One segment of one matrix, and where its bf16 tiles are: weights that are bf16
// already are used in place.
struct ScaleSegment {
  const uint8_t* source;
  int num_k;
  unsigned mark;
  Format format;

  int num_tiles() const { return ceil_div(num_k, kTileK); }
  bool in_place() const { return format == Format::kBf16 && num_k % kTileK == 0; }

  // Returns the bytes of weights that were read. Prefetches ahead of `prefetch`, which
  // is the tile itself or, if tiles are read out of order, a cursor that is not.
  DUCK_INLINE int convert_tile(int t, const uint8_t* prefetch, uint8_t* tiles) const {
    bool is_half = (t + 1) * kTileK > num_k;
    int tile_k = is_half ? kTileK / 2 : kTileK;
    int num_bytes = int(packed_bytes(format, tile_k * kGroup));
    if (in_place()) return num_bytes;
    uint8_t* tile = tiles + t * kTileBytes;
    const uint8_t* from = source + packed_bytes(format, t * kTileK * kGroup);
    if (is_half) std::memset(tile + kTileBytes / 2, 0, kTileBytes / 2);
    switch (format) {
      case Format::kBf16:
        std::memcpy(tile, from, num_bytes);
        break;
      case Format::kE4m3:
        if (!is_half && !(mark >> t & 1))
          convert_k<Format::kE4m3, false, kTileK>(from, prefetch, tile);
        else
          convert_as<Format::kE4m3>(is_half, from, prefetch, tile);
        break;
      case Format::kInt8:
        convert_as<Format::kInt8>(is_half, from, prefetch, tile);
        break;
      case Format::kInt4:
        convert_as<Format::kInt4>(is_half, from, prefetch, tile);
        break;
    }
    return num_bytes;
  }

  const uint8_t* convert(uint8_t* tiles) const {
    const uint8_t* at = source;
    for (int t = 0; t < num_tiles(); ++t) at += convert_tile(t, at, tiles);
    return in_place() ? source : tiles;
  }

 private:
  template <Format kFormat>
  DUCK_INLINE static void convert_as(bool is_half, const uint8_t* from,
                                     const uint8_t* prefetch, uint8_t* tile) {
    if (is_half)
      convert_k<kFormat, true, kTileK / 2>(from, prefetch, tile);
    else
      convert_k<kFormat, true, kTileK>(from, prefetch, tile);
  }
};

DUCK_INLINE ScaleSegment gate_up_segment(const ExpertView& expert, int group,
                                         int segment, int matrix) {
  KAxis axis = expert.shape->gate_up_axis();
  Format format = expert.shape->format;
  int k = axis.begin(segment), num_k = axis.end(segment) - k;
  size_t at = packed_bytes(format, size_t(kGroup) * (2 * k + matrix * num_k));
  return {expert.gate_up(group) + at, num_k,
          expert.gate_up_mark(group, segment, matrix), format};
}

DUCK_INLINE ScaleSegment down_segment(const ExpertView& expert, int group,
                                      int segment) {
  KAxis axis = expert.shape->down_axis();
  Format format = expert.shape->format;
  int k = axis.begin(segment), num_k = axis.end(segment) - k;
  return {expert.down(group) + packed_bytes(format, size_t(kGroup) * k), num_k,
          expert.down_mark(group, segment), format};
}

inline __m512 scale_vector(const SegmentScale& scale) {
  return scale.columns ? Avx512Simd::load_bf16(scale.columns)
                       : _mm512_set1_ps(scale.block);
}

}  // namespace
}  // namespace duck
