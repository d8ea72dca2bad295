// Packed weights -> bf16 tiles that the tile unit can load.
#pragma once

#include <cstring>

#include "amx_tiles.h"
#include "few_rows.h"
#include "kernel.h"
#include "simd_avx512.h"

namespace duck {
namespace {

constexpr int kSegmentTileBytes = kTilesPerSegment * kTileBytes;

template <bool kAnyZeroExponent, int kSteps>
inline void convert_steps(const uint8_t* source, const uint8_t* prefetch,
                          uint8_t* tile) {
#pragma GCC unroll 8
  for (int step = 0; step < kSteps; ++step) {
    const uint8_t* at = source + step * 64;
    prefetch_line<Avx512Simd>(prefetch + step * 64);
    __m512i pairs[2];
    Avx512Simd::decode_e4m3_pairs<kAnyZeroExponent>(at, pairs);
    _mm512_store_si512(tile + step * 128, pairs[0]);
    _mm512_store_si512(tile + step * 128 + 64, pairs[1]);
  }
}

// One segment of one matrix, and where its bf16 tiles are: weights that are bf16
// already are used in place.
struct Segment {
  const uint8_t* source;
  int num_k;
  unsigned mark;
  Format format;

  int num_tiles() const { return ceil_div(num_k, kTileK); }
  bool in_place() const { return format == Format::kBf16 && num_k % kTileK == 0; }

  // Returns the bytes of weights that were read. Prefetches ahead of `prefetch`, which
  // is the tile itself or, if tiles are read out of order, a cursor that is not.
  int convert_tile(int t, const uint8_t* prefetch, uint8_t* tiles) const {
    bool is_half = (t + 1) * kTileK > num_k;
    int tile_k = is_half ? kTileK / 2 : kTileK;
    int num_bytes = tile_k * kGroup * element_bytes(format);
    if (in_place()) return num_bytes;
    uint8_t* tile = tiles + t * kTileBytes;
    const uint8_t* from = source + t * kTileK * kGroup * element_bytes(format);
    if (is_half) std::memset(tile + kTileBytes / 2, 0, kTileBytes / 2);
    if (format == Format::kBf16)
      std::memcpy(tile, from, num_bytes);
    else if (is_half)
      convert_steps<true, 4>(from, prefetch, tile);
    else if (mark >> t & 1)
      convert_steps<true, 8>(from, prefetch, tile);
    else
      convert_steps<false, 8>(from, prefetch, tile);
    return num_bytes;
  }

  const uint8_t* convert(uint8_t* tiles) const {
    const uint8_t* at = source;
    for (int t = 0; t < num_tiles(); ++t) at += convert_tile(t, at, tiles);
    return in_place() ? source : tiles;
  }
};

Segment gate_up_segment(const ExpertView& expert, int group, int segment, int matrix) {
  KAxis axis = expert.shape->gate_up_axis();
  Format format = expert.shape->format;
  int k = axis.begin(segment), num_k = axis.end(segment) - k;
  size_t at = size_t(kGroup) * element_bytes(format) * (2 * k + matrix * num_k);
  return {expert.gate_up(group) + at, num_k,
          expert.gate_up_marks(group)[2 * segment + matrix], format};
}

Segment down_segment(const ExpertView& expert, int group, int segment) {
  KAxis axis = expert.shape->down_axis();
  Format format = expert.shape->format;
  int k = axis.begin(segment), num_k = axis.end(segment) - k;
  return {expert.down(group) + size_t(kGroup) * element_bytes(format) * k, num_k,
          expert.down_marks(group)[segment], format};
}

}  // namespace
}  // namespace duck
