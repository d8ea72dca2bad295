// Eight fp32 numbers. Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/inline.h"
#include "simd/int4_tables.h"

namespace duck {
namespace {

struct Avx2Simd {
  typedef __m256 F;
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float value) { return _mm256_set1_ps(value); }
  // Opaque: g++ would keep the value for the next vector of columns, and spill sums to
  // the stack for it.
  static F broadcast_from(const float* at) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return broadcast(*at);  // g++ instruments code with this asm for minutes
#else
    F value;
    asm volatile("vbroadcastss %1, %0" : "=x"(value) : "m"(*at));
    return value;
#endif
  }
  static F load(const float* at) { return _mm256_loadu_ps(at); }
  static void store(float* at, F value) { _mm256_storeu_ps(at, value); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add_exact_product(F a, F b, F sum) { return _mm256_fmadd_ps(a, b, sum); }
  DUCK_INLINE static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }
  DUCK_INLINE static void prefetch_far(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
  }

  // decode_e4m3<false> leaves the upper exponent bits zero, which saves an eighth of
  // the instructions: it gives weights times 2^-120, not 2^-8, and wants activations
  // times 2^112.
  static constexpr float kInputScale = 0x1p112f;

  // As in PortableSimd, but with the first shifts on 16-bit halves: 5 of them make
  // two registers of bf16 pairs.
  template <bool kAnyZeroExponent>
  static void decode_e4m3(const uint8_t* at, F w[4]) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 4);
    __m256i high = _mm256_srai_epi16(codes, 4);
    w[0] = masked(_mm256_slli_epi32(low, 16));
    w[1] = masked(low);
    w[2] = masked(_mm256_slli_epi32(high, 16));
    w[3] = masked(high);
    if (kAnyZeroExponent)
      for (int k = 0; k < 4; ++k)
        w[k] = fix_zero_exponent(_mm256_or_ps(w[k], _mm256_set1_ps(0x1p-15f)));
  }

  static bool any_zero_exponent(const uint8_t* at) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    __m256i exponents = _mm256_and_si256(codes, _mm256_set1_epi8(0x78));
    __m256i zeros = _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256());
    return !_mm256_testz_si256(zeros, zeros);
  }

  static void decode_bf16(const uint8_t* at, F w[2]) {
    split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), w);
  }

  // The code in the lowest mantissa bits of 2^23, less 2^23 + 128.
  static void decode_int8(const uint8_t* at, F w[4]) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m256i first = _mm256_set1_epi32(0xff);
    w[0] = from_offset(_mm256_and_si256(codes, first));
    w[1] = from_offset(_mm256_and_si256(_mm256_srli_epi32(codes, 16), first));
    w[2] = from_offset(_mm256_and_si256(_mm256_srli_epi32(codes, 8), first));
    w[3] = from_offset(_mm256_srli_epi32(codes, 24));
  }

  // Looks the two bytes of a bf16 up for each nibble, and interleaves them.
  static void decode_int4(const uint8_t* at, F w[8]) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    __m256i first = _mm256_and_si256(codes, nibble);
    __m256i second = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    split_nibbles(first, w, w + 4);
    split_nibbles(second, w + 2, w + 6);
  }

  static F load_bf16(const uint16_t* at) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

 private:
  static F from_offset(__m256i code) {
    __m256i placed = _mm256_or_si256(code, _mm256_set1_epi32(0x4b000000));
    return _mm256_sub_ps(_mm256_castsi256_ps(placed), _mm256_set1_ps(8388736.0f));
  }
  static void split_nibbles(__m256i nibbles, F step0[2], F step1[2]) {
    const __m256i high_bytes = _mm256_broadcastsi128_si256(int4_high_bytes());
    const __m256i low_bytes = _mm256_broadcastsi128_si256(int4_low_bytes());
    __m256i high = _mm256_shuffle_epi8(high_bytes, nibbles);
    __m256i low = _mm256_shuffle_epi8(low_bytes, nibbles);
    split(_mm256_unpacklo_epi8(low, high), step0);
    split(_mm256_unpackhi_epi8(low, high), step1);
  }
  // Sign, four exponent bits and mantissa.
  static F masked(__m256i shifted) {
    __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi32(int32_t(0x87f00000u)));
    return _mm256_castsi256_ps(bits);
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
