// Sixteen fp32 numbers in the compiler's vector extension, for every instruction set.
// Include after the target pragma of the source that uses it.
#pragma once

#include <cstring>

#include "simd/bf16.h"

namespace duck {
namespace {

constexpr int kVec16 = 16;

typedef float Vec16 __attribute__((vector_size(64)));

inline Vec16 load_vec16(const void* at) {
  Vec16 value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void store_vec16(void* at, Vec16 value) {
  std::memcpy(at, &value, sizeof value);
}

// `count` < 16 elements, then zeros.
inline Vec16 load_tail(const float* at, int count) {
  float padded[kVec16] = {};
  for (int i = 0; i < count; ++i) padded[i] = at[i];
  return load_vec16(padded);
}

// The sum, in halves.
inline float fold(Vec16 value) {
  float numbers[kVec16];
  store_vec16(numbers, value);
  for (int half = kVec16 / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  return numbers[0];
}

inline Vec16 max_vec16(Vec16 a, Vec16 b) { return a > b ? a : b; }

inline float fold_max(Vec16 value) {
  float numbers[kVec16], peak;
  store_vec16(numbers, value);
  peak = numbers[0];
  for (int i = 1; i < kVec16; ++i) peak = numbers[i] > peak ? numbers[i] : peak;
  return peak;
}

// Exchanges the blocks of `kStep` numbers off the diagonal between rows i and i +
// kStep.
template <int kStep>
inline void exchange(Vec16 rows[kVec16]) {
  typedef int32_t Mask __attribute__((vector_size(64)));
  Mask upper, lower;
  for (int i = 0; i < kVec16; ++i) {
    bool is_high = i & kStep;
    upper[i] = is_high ? kVec16 + i - kStep : i;
    lower[i] = is_high ? kVec16 + i : i + kStep;
  }
  for (int i = 0; i < kVec16; ++i) {
    if (i & kStep) continue;
    Vec16 a = rows[i], b = rows[i + kStep];
    rows[i] = __builtin_shuffle(a, b, upper);
    rows[i + kStep] = __builtin_shuffle(a, b, lower);
  }
}

// Transposes 16 x 16 dwords.
inline void transpose(Vec16 rows[kVec16]) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

}  // namespace
}  // namespace duck
