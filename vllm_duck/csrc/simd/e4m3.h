// One e4m3 number at a time: four bits of exponent, three of mantissa, no infinity.
//
// With AVX-512 there are two decoders by need, not by oversight: Avx512Simd's are for
// weights, which hold no NaN and may come out times 2^-8; decode_avx512.h of the host
// is for caches, whose numbers are exact and may be NaN. Include after the target
// pragma of the source that uses it.
#pragma once

#include "simd/bf16.h"

namespace duck {
namespace {

// |x| <= 448, to nearest even; NaN stays NaN.
inline uint8_t e4m3_from_float(float x) {
  uint32_t bits = bits_from_float(x);
  uint32_t sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t even = magnitude >> 20 & 1u;
  uint32_t normal = ((magnitude + 0x7ffffu + even) >> 20) - (120u << 3);
  // Below 2^-6 the step is 2^-9, which is that of the sum with 2^14.
  float shifted = float_from_bits(magnitude) + 16384.0f;
  uint32_t subnormal = bits_from_float(shifted) - bits_from_float(16384.0f);
  uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return uint8_t(sign | code);
}

inline float e4m3_to_float(uint8_t code) {
  uint32_t magnitude = code & 0x7fu;
  uint32_t normal = (magnitude << 20) + (120u << 23);
  uint32_t subnormal = bits_from_float(float(int32_t(magnitude)) * 0x1p-9f);
  uint32_t bits = magnitude < 8u ? subnormal : normal;
  bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
  return float_from_bits(bits | uint32_t(code & 0x80u) << 24);
}

}  // namespace
}  // namespace duck
