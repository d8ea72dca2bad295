// e4m3 with AVX-512 BW: 32 codes at once, in 16 bits each.
// Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include "host/kernels/cache_rows.h"

namespace duck {
namespace host {
namespace {

struct Avx512Decode {
  static void scaled(const uint8_t* codes, float scale, uint16_t* out) {
    __m512 factor = _mm512_set1_ps(scale);
    for (int i = 0; i < kScaleBlock; i += 32) {
      __m512i numbers = to_bf16(codes + i);
      __m512i even = _mm512_slli_epi32(numbers, 16);
      __m512i odd = _mm512_and_si512(numbers, _mm512_set1_epi32(int32_t(0xffff0000u)));
      even = round(_mm512_mul_ps(_mm512_castsi512_ps(even), factor));
      odd = round(_mm512_mul_ps(_mm512_castsi512_ps(odd), factor));
      // The rounded halves are on top: even ones move down, odd ones stay.
      __m512i both =
          _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xaaaaaaaau, odd);
      _mm512_storeu_si512(out + i, both);
    }
  }

  static void exact(const uint8_t* codes, uint16_t* out) {
    for (int i = 0; i < kScaleBlock; i += 32)
      _mm512_storeu_si512(out + i, to_bf16(codes + i));
  }

 private:
  static __m512i to_bf16(const uint8_t* codes) {
    __m512i code = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    __m512i sign = _mm512_slli_epi16(_mm512_sub_epi16(code, magnitude), 8);
    __m512i value =
        _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    // m * 2^-9 for m = 0..7; the index is taken modulo 32.
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __mmask32 is_subnormal = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, is_subnormal, magnitude, subnormals);
    __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(value, sign);
  }

  // bf16_from_float, left in the upper half; NaN keeps its bits, which is a NaN.
  static __m512i round(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
    return _mm512_mask_mov_epi32(
        _mm512_castps_si512(_mm512_set1_ps(__builtin_nanf(""))), is_number, rounded);
  }
};

}  // namespace
}  // namespace host
}  // namespace duck
