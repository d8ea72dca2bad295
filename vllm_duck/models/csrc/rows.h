// Operations on one row of activations.
//
// Sums over a row run in 16 chains (element i belongs to chain i % 16), which are then
// folded in halves: the same bits for every instruction set.
// Include after the target pragma of the source that uses it.
#pragma once

#include <cstring>

#include "silu.h"

namespace duck {
namespace host {
namespace {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float Lanes __attribute__((vector_size(64)));

inline Lanes load_lanes(const float* at) {
  Lanes value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The n % 16 last elements, then zeros.
inline Lanes load_tail(const float* at, int count) {
  float padded[16] = {};
  for (int i = 0; i < count; ++i) padded[i] = at[i];
  return load_lanes(padded);
}

inline float fold(Lanes value) {
  float lane[16];
  std::memcpy(lane, &value, sizeof lane);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

template <class Term>
inline float sum_row(const float* x, int n, const Term& term) {
  Lanes total = {};
  int i = 0;
  for (; i + 16 <= n; i += 16) total += term(load_lanes(x + i));
  if (i < n) total += term(load_tail(x + i, n - i));
  return fold(total);
}

inline float sum(const float* x, int n) {
  return sum_row(x, n, [](Lanes v) { return v; });
}

inline float sum_of_squares(const float* x, int n) {
  return sum_row(x, n, [](Lanes v) { return v * v; });
}

inline float max_magnitude(const float* x, int n) {
  float peak = 0;
  for (int i = 0; i < n; ++i) {
    float magnitude = __builtin_fabsf(x[i]);
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak;
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

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
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

#pragma GCC diagnostic pop

}  // namespace
}  // namespace host
}  // namespace duck
