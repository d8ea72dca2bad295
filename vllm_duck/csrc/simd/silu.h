// silu(gate) * up for one group, in steps that every compiler rounds alike.
#pragma once

#include "simd/bf16.h"
#include "simd/tile.h"

namespace duck {
namespace {

// exp(x) for x in [-87, 88] by Cephes' expf polynomial, within 2 ulp. Adding 1.5 * 2^23
// rounds to an integer and leaves it in the low mantissa bits.
inline float exp_clamped(float x) {
  constexpr float kRound = 12582912.0f;
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float shifted = x * 1.44269504088896341f + kRound;
  float n = shifted - kRound;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return float_from_bits(bits_from_float(p) + (bits_from_float(shifted) << 23));
}

inline float silu(float x) {
  float e = exp_clamped(-x);
  e = x < -88.0f ? __builtin_inff() : e;
  return x / (1.0f + e);
}

inline void silu_mul_group(const float* gate, const float* up, uint16_t* act) {
  for (int i = 0; i < kGroup; ++i) act[i] = bf16_from_float(silu(gate[i]) * up[i]);
}

}  // namespace
}  // namespace duck
