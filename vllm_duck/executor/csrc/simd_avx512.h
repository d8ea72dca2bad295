// Sixteen fp32 lanes. Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace duck {
namespace {

struct Avx512Simd {
  typedef __m512 F;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;

  static F zero() { return _mm512_setzero_ps(); }
  static F broadcast(float value) { return _mm512_set1_ps(value); }
  static F load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, F value) { _mm512_storeu_ps(at, value); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add_exact_product(F a, F b, F sum) { return _mm512_fmadd_ps(a, b, sum); }
  static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }
  static void prefetch_far(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
  }

  template <bool kAnyZeroExponent>
  static void decode_e4m3(const uint8_t* at, F w[4]) {
    __m512i pairs[2];
    decode_e4m3_pairs<kAnyZeroExponent>(at, pairs);
    split(pairs[0], w);
    split(pairs[1], w + 2);
  }

  // The step's two bf16 pairs for each lane: (k0, k1) and (k2, k3), times 2^-8.
  template <bool kAnyZeroExponent>
  static void decode_e4m3_pairs(const uint8_t* at, __m512i pairs[2]) {
    __m512i codes = _mm512_loadu_si512(at);
    pairs[0] = to_bf16<kAnyZeroExponent>(_mm512_slli_epi16(codes, 8));
    pairs[1] = to_bf16<kAnyZeroExponent>(codes);
  }

  static void decode_bf16(const uint8_t* at, F w[2]) {
    split(_mm512_loadu_si512(at), w);
  }

 private:
  template <bool kAnyZeroExponent>
  static __m512i to_bf16(__m512i high_bytes) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    __m512i placed = _mm512_srai_epi16(high_bytes, 4);
    __m512i value = _mm512_ternarylogic_epi32(
        placed, _mm512_set1_epi16(int16_t(0x87f0)), _mm512_set1_epi16(0x3800), kAndOr);
    if (!kAnyZeroExponent) return value;
    // m * 2^-17 for m = 0..7, looked up by the five bits that hold exponent and
    // mantissa; only lanes with a zero exponent use it.
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
