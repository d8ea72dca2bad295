// Sixteen fp32 numbers. Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/inline.h"
#include "simd/int4_tables.h"

namespace duck {
namespace {

struct Avx512Simd {
  typedef __m512 F;
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;

  static F zero() { return _mm512_setzero_ps(); }
  static F broadcast(float value) { return _mm512_set1_ps(value); }
  static F broadcast_from(const float* at) { return broadcast(*at); }
  static F load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, F value) { _mm512_storeu_ps(at, value); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add_exact_product(F a, F b, F sum) { return _mm512_fmadd_ps(a, b, sum); }
  DUCK_INLINE static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }
  DUCK_INLINE static void prefetch_far(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
  }

  static constexpr float kInputScale = 1;

  template <bool kAnyZeroExponent>
  static void decode_e4m3(const uint8_t* at, F w[4]) {
    __m512i pairs[2];
    decode_e4m3_pairs<kAnyZeroExponent>(at, pairs);
    split(pairs[0], w);
    split(pairs[1], w + 2);
  }

  // The step's two bf16 pairs for each column: (k0, k1) and (k2, k3), times 2^-8.
  template <bool kAnyZeroExponent>
  static void decode_e4m3_pairs(const uint8_t* at, __m512i pairs[2]) {
    __m512i codes = _mm512_loadu_si512(at);
    pairs[0] = to_bf16<kAnyZeroExponent>(_mm512_slli_epi16(codes, 8));
    pairs[1] = to_bf16<kAnyZeroExponent>(codes);
  }

  static bool any_zero_exponent(const uint8_t* at) {
    return _mm512_testn_epi8_mask(_mm512_loadu_si512(at), _mm512_set1_epi8(0x78)) != 0;
  }

  static void decode_bf16(const uint8_t* at, F w[2]) {
    split(_mm512_loadu_si512(at), w);
  }

  // The code in the lowest mantissa bits of 2^23, less 2^23 + 128.
  static void decode_int8(const uint8_t* at, F w[4]) {
    __m512i codes = _mm512_loadu_si512(at);
    w[0] = from_offset(codes);
    w[1] = from_offset(_mm512_srli_epi32(codes, 16));
    w[2] = from_offset(_mm512_srli_epi32(codes, 8));
    w[3] = from_offset(_mm512_srli_epi32(codes, 24));
  }

  static void decode_int8_pairs(const uint8_t* at, __m512i pairs[2]) {
    F w[4];
    decode_int8(at, w);
    pairs[0] = join(w[0], w[1]);
    pairs[1] = join(w[2], w[3]);
  }

  static void decode_int4(const uint8_t* at, F w[8]) {
    __m512i pairs[4];
    decode_int4_pairs(at, pairs);
    for (int i = 0; i < 4; ++i) split(pairs[i], w + 2 * i);
  }

  // Looks the two bytes of a bf16 up for each nibble, and interleaves them.
  static void decode_int4_pairs(const uint8_t* at, __m512i pairs[4]) {
    __m512i codes = _mm512_loadu_si512(at);
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    look_up_nibbles(_mm512_and_si512(codes, nibble), pairs);
    look_up_nibbles(_mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble), pairs + 1);
  }

  static F load_bf16(const uint16_t* at) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

 private:
  static F from_offset(__m512i codes) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    __m512i placed = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0xff),
                                               _mm512_set1_epi32(0x4b000000), kAndOr);
    return _mm512_sub_ps(_mm512_castsi512_ps(placed), _mm512_set1_ps(8388736.0f));
  }
  // Both must be bf16 already.
  static __m512i join(F even, F odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(odd));
  }
  static void look_up_nibbles(__m512i nibbles, __m512i pairs[4]) {
    const __m512i high_bytes = _mm512_broadcast_i32x4(int4_high_bytes());
    const __m512i low_bytes = _mm512_broadcast_i32x4(int4_low_bytes());
    __m512i high = _mm512_shuffle_epi8(high_bytes, nibbles);
    __m512i low = _mm512_shuffle_epi8(low_bytes, nibbles);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[2] = _mm512_unpackhi_epi8(low, high);
  }
  template <bool kAnyZeroExponent>
  static __m512i to_bf16(__m512i high_bytes) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    __m512i placed = _mm512_srai_epi16(high_bytes, 4);
    __m512i value = _mm512_ternarylogic_epi32(
        placed, _mm512_set1_epi16(int16_t(0x87f0)), _mm512_set1_epi16(0x3800), kAndOr);
    if (!kAnyZeroExponent) return value;
    // m * 2^-17 for m = 0..7, looked up by the five bits that hold exponent and
    // mantissa; only elements with a zero exponent use it.
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
    __mmask32 is_subnormal = _mm512_testn_epi16_mask(placed, _mm512_set1_epi16(0x0780));
    __m512i looked_up =
        _mm512_permutexvar_epi16(_mm512_srli_epi16(placed, 4), subnormals);
    looked_up = _mm512_ternarylogic_epi32(placed, _mm512_set1_epi16(int16_t(0x8000)),
                                          looked_up, kAndOr);
    return _mm512_mask_mov_epi16(value, is_subnormal, looked_up);
  }
  static void split(__m512i pairs, F w[2]) {
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    w[1] = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000u))));
  }
};

}  // namespace
}  // namespace duck
