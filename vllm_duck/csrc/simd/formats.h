// How weights lie in memory, whoever packs them: formats, groups, segments, tiles.
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

// What the sum over one segment is multiplied with, for the 16 columns of a group: one
// fp32 number (`columns` is null), or 16 in bf16.
struct SegmentScale {
  float block;
  const uint16_t* columns;
};

// Where a kernel is in a stream of weights. Segments lie in memory in the order in
// which they are used, so that each is reached from the one before by additions: to ask
// for each would take longer than to multiply a short one.
template <Format kFormat>
struct SegmentCursor {
  const uint8_t* weights;
  const uint8_t* marks;
  const uint16_t* column_scales;

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
};

}  // namespace duck
