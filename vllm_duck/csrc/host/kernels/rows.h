// Operations on one row of activations.
//
// Sums over a row run in 16 chains (element i belongs to chain i % 16), which are then
// folded in halves: the same bits for every instruction set.
// Include after the target pragma of the source that uses it.
#pragma once

#include "simd/silu.h"
#include "simd/vec16.h"

namespace duck {
namespace host {
namespace {

template <class Term>
inline float sum_row(const float* x, int n, const Term& term) {
  Vec16 total = {};
  int i = 0;
  for (; i + kVec16 <= n; i += kVec16) total += term(load_vec16(x + i));
  if (i < n) total += term(load_tail(x + i, n - i));
  return fold(total);
}

inline float sum(const float* x, int n) {
  return sum_row(x, n, [](Vec16 v) { return v; });
}

inline float sum_of_squares(const float* x, int n) {
  return sum_row(x, n, [](Vec16 v) { return v * v; });
}

// Magnitudes order as their bits do.
inline float max_magnitude(const float* x, int n) {
  uint32_t peak = 0;
  for (int i = 0; i < n; ++i) {
    uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffffu;
    peak = magnitude > peak ? magnitude : peak;
  }
  return float_from_bits(peak);
}

inline void widen(const uint16_t* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = bf16_to_float(x[i]);
}

inline void narrow(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) out[i] = bf16_from_float(x[i]);
}

inline float rms_scale(const float* x, int n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / float(n) + eps);
}

inline void rms_norm(const float* x, const float* weight, int n, float eps,
                     float* out) {
  float scale = rms_scale(x, n, eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline void rms_norm(const float* x, const float* weight, int n, float eps,
                     uint16_t* out) {
  float scale = rms_scale(x, n, eps);
  for (int i = 0; i < n; ++i) out[i] = bf16_from_float(x[i] * scale * weight[i]);
}

// In place.
inline void layer_norm(float* x, const float* weight, const float* bias, int n,
                       float eps) {
  float mean = sum(x, n) / float(n);
  for (int i = 0; i < n; ++i) x[i] -= mean;
  float scale = rms_scale(x, n, eps);
  for (int i = 0; i < n; ++i) x[i] = x[i] * scale * weight[i] + bias[i];
}

// Turns n / 2 pairs of channels by the complex numbers in `rotation`.
inline void rotate(const float* x, const float* rotation, int n, float* out) {
  for (int i = 0; i < n; i += 2) {
    float real = x[i], imaginary = x[i + 1];
    out[i] = real * rotation[i] - imaginary * rotation[i + 1];
    out[i + 1] = real * rotation[i + 1] + imaginary * rotation[i];
  }
}

inline void rotate(const float* x, const float* rotation, int n, uint16_t* out) {
  for (int i = 0; i < n; i += 2) {
    float real = x[i], imaginary = x[i + 1];
    out[i] = bf16_from_float(real * rotation[i] - imaginary * rotation[i + 1]);
    out[i + 1] = bf16_from_float(real * rotation[i + 1] + imaginary * rotation[i]);
  }
}

}  // namespace
}  // namespace host
}  // namespace duck
