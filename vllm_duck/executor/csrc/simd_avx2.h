// Eight fp32 lanes. Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace duck {
namespace {

struct Avx2Simd {
  typedef __m256 F;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float value) { return _mm256_set1_ps(value); }
  static F load(const float* at) { return _mm256_loadu_ps(at); }
  static void store(float* at, F value) { _mm256_storeu_ps(at, value); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add_exact_product(F a, F b, F sum) { return _mm256_fmadd_ps(a, b, sum); }
  static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }
  static void prefetch_far(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
  }

  // As in PortableSimd, but with the first shifts on 16-bit halves: 5 of them make
  // two registers of bf16 pairs.
  template <bool kAnyZeroExponent>
  static void decode_e4m3(const uint8_t* at, F w[4]) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    __m256i low = to_bf16(_mm256_slli_epi16(codes, 8));
    __m256i high = to_bf16(codes);
    split(low, w);
    split(high, w + 2);
    if (kAnyZeroExponent)
      for (int k = 0; k < 4; ++k) w[k] = fix_zero_exponent(w[k]);
  }

  static void decode_bf16(const uint8_t* at, F w[2]) {
    split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), w);
  }

 private:
  static __m256i to_bf16(__m256i high_bytes) {
    __m256i placed = _mm256_srai_epi16(high_bytes, 4);
    placed = _mm256_and_si256(placed, _mm256_set1_epi16(int16_t(0x87f0)));
    return _mm256_or_si256(placed, _mm256_set1_epi16(0x3800));
  }
  static void split(__m256i pairs, F w[2]) {
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    w[1] = _mm256_castsi256_ps(
        _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000u))));
  }
  // See PortableSimd::widen; below 2^-14 are just the codes with a zero exponent.
  static F fix_zero_exponent(F value) {
    F sign = _mm256_and_ps(value, _mm256_set1_ps(-0.0f));
    F limit = _mm256_set1_ps(0x1p-14f);
    F correction = _mm256_sub_ps(value, _mm256_or_ps(sign, limit));
    F is_subnormal = _mm256_cmp_ps(_mm256_xor_ps(value, sign), limit, _CMP_LT_OQ);
    return _mm256_add_ps(value, _mm256_and_ps(correction, is_subnormal));
  }
};

}  // namespace
}  // namespace duck
