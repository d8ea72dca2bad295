// int4 codes as bf16, byte by byte, for byte shuffles.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace duck {
namespace {

// The bytes of 0 .. 7, -8 .. -1 as bf16.
inline __m128i int4_high_bytes() {
  return _mm_setr_epi8(0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, int8_t(0xc1),
                       int8_t(0xc0), int8_t(0xc0), int8_t(0xc0), int8_t(0xc0),
                       int8_t(0xc0), int8_t(0xc0), int8_t(0xbf));
}
inline __m128i int4_low_bytes() {
  return _mm_setr_epi8(0, int8_t(0x80), 0, 0x40, int8_t(0x80), int8_t(0xa0),
                       int8_t(0xc0), int8_t(0xe0), 0, int8_t(0xe0), int8_t(0xc0),
                       int8_t(0xa0), int8_t(0x80), 0x40, 0, int8_t(0x80));
}

}  // namespace
}  // namespace duck
