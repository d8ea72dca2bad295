// Sixteen fp32 lanes in the compiler's vector extension, for every instruction set.
// Include after the target pragma of the source that uses it.
#pragma once

#include <cstring>

#include "simd/bf16.h"

namespace duck {
namespace host {
namespace {

constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(64)));

inline Lanes load_lanes(const void* at) {
  Lanes value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void store_lanes(void* at, Lanes value) {
  std::memcpy(at, &value, sizeof value);
}

// `count` < 16 elements, then zeros.
inline Lanes load_tail(const float* at, int count) {
  float padded[kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = at[i];
  return load_lanes(padded);
}

// Adds the lanes up, in halves.
inline float fold(Lanes value) {
  float lane[kLanes];
  store_lanes(lane, value);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

inline Lanes max_lanes(Lanes a, Lanes b) { return a > b ? a : b; }

inline float fold_max(Lanes value) {
  float lane[kLanes], peak;
  store_lanes(lane, value);
  peak = lane[0];
  for (int i = 1; i < kLanes; ++i) peak = lane[i] > peak ? lane[i] : peak;
  return peak;
}

// Exchanges the blocks of `kStep` lanes off the diagonal between rows i and i + kStep.
template <int kStep>
inline void exchange(Lanes rows[kLanes]) {
  typedef int32_t Mask __attribute__((vector_size(64)));
  Mask upper, lower;
  for (int i = 0; i < kLanes; ++i) {
    bool is_high = i & kStep;
    upper[i] = is_high ? kLanes + i - kStep : i;
    lower[i] = is_high ? kLanes + i : i + kStep;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    Lanes a = rows[i], b = rows[i + kStep];
    rows[i] = __builtin_shuffle(a, b, upper);
    rows[i + kStep] = __builtin_shuffle(a, b, lower);
  }
}

// Transposes 16 x 16 dwords.
inline void transpose(Lanes rows[kLanes]) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

}  // namespace
}  // namespace host
}  // namespace duck
