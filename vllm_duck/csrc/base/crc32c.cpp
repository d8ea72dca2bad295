#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace duck {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed

using Table = std::array<uint32_t, 256>;

uint32_t step(uint32_t crc) { return (crc >> 1) ^ (crc & 1 ? kPolynomial : 0); }

// tables[n][b]: the register after byte b and n zero bytes.
struct Tables {
  std::array<Table, 8> tables;

  Tables() {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t crc = b;
      for (int bit = 0; bit < 8; ++bit) crc = step(crc);
      tables[0][b] = crc;
    }
    for (int n = 1; n < 8; ++n)
      for (int b = 0; b < 256; ++b) {
        uint32_t crc = tables[n - 1][b];
        tables[n][b] = (crc >> 8) ^ tables[0][crc & 255];
      }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

// Slices of eight; the register goes in and comes out without its final complement.
uint32_t with_tables(uint32_t crc, const uint8_t* at, size_t num_bytes) {
  const auto& t = tables().tables;
  for (; num_bytes >= 8; at += 8, num_bytes -= 8) {
    crc ^= at[0] | at[1] << 8 | at[2] << 16 | uint32_t(at[3]) << 24;
    crc = t[7][crc & 255] ^ t[6][crc >> 8 & 255] ^ t[5][crc >> 16 & 255] ^
          t[4][crc >> 24] ^ t[3][at[4]] ^ t[2][at[5]] ^ t[1][at[6]] ^ t[0][at[7]];
  }
  for (; num_bytes; ++at, --num_bytes) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)

// The crc32 instruction takes one word a cycle but answers after three, so three
// strands of this many bytes run side by side and are joined afterwards.
constexpr size_t kStrand = 1024;

// What kStrand zero bytes make of a register, byte by byte of it.
struct Shift {
  std::array<Table, 4> tables;

  Shift() {
    uint32_t of_bit[32];
    const uint8_t zeros[kStrand] = {};
    for (int bit = 0; bit < 32; ++bit)
      of_bit[bit] = with_tables(1u << bit, zeros, kStrand);
    for (int byte = 0; byte < 4; ++byte)
      for (int value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (int bit = 0; bit < 8; ++bit)
          if (value >> bit & 1) sum ^= of_bit[8 * byte + bit];
        tables[byte][value] = sum;
      }
  }

  uint32_t operator()(uint32_t crc) const {
    return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^
           tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24];
  }
};

uint64_t word(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

__attribute__((target("sse4.2"))) uint32_t with_sse42(uint32_t crc, const uint8_t* at,
                                                      size_t num_bytes) {
  static const Shift shift;
  for (; num_bytes >= 3 * kStrand; at += 3 * kStrand, num_bytes -= 3 * kStrand) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStrand; i += 8) {
      a = _mm_crc32_u64(a, word(at + i));
      b = _mm_crc32_u64(b, word(at + kStrand + i));
      c = _mm_crc32_u64(c, word(at + 2 * kStrand + i));
    }
    crc = shift(shift(uint32_t(a)) ^ uint32_t(b)) ^ uint32_t(c);
  }
  uint64_t wide = crc;
  for (; num_bytes >= 8; at += 8, num_bytes -= 8) wide = _mm_crc32_u64(wide, word(at));
  crc = uint32_t(wide);
  for (; num_bytes; ++at, --num_bytes) crc = _mm_crc32_u8(crc, *at);
  return crc;
}

// x^n modulo the polynomial, as carry-less products of reversed bits want it.
uint64_t power(int n) {
  uint32_t value = 1u << 31;
  while (n-- > 0) value = step(value);
  return uint64_t(value) << 1;
}

// Moves 16 bytes on by so many bytes of message: their product with two powers of x.
struct Fold {
  explicit Fold(int num_bytes)
      : low(power(8 * num_bytes + 32)), high(power(8 * num_bytes - 32)) {}
  uint64_t low, high;
};

#define DUCK_VPCLMUL __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

DUCK_VPCLMUL __m512i load(const uint8_t* from) {
  return _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from));
}

DUCK_VPCLMUL __m512i broadcast(const Fold& fold) {
  return _mm512_broadcast_i32x4(_mm_set_epi64x(int64_t(fold.high), int64_t(fold.low)));
}

DUCK_VPCLMUL __m512i folded(__m512i x, __m512i fold, __m512i next) {
  __m512i low = _mm512_clmulepi64_epi128(x, fold, 0x00);
  __m512i high = _mm512_clmulepi64_epi128(x, fold, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // exclusive or of all
}

DUCK_VPCLMUL __m128i folded(__m128i x, const Fold& fold, __m128i next) {
  __m128i by = _mm_set_epi64x(int64_t(fold.high), int64_t(fold.low));
  __m128i low = _mm_clmulepi64_si128(x, by, 0x00);
  __m128i high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Four vectors run side by side and are joined at the end; from here on.
constexpr size_t kVectorBytes = 64;
constexpr size_t kWorthVectors = 8 * kVectorBytes;

DUCK_VPCLMUL uint32_t with_vpclmul(uint32_t crc, const uint8_t* at, size_t num_bytes) {
  static const Fold four_vectors(4 * kVectorBytes), vector(kVectorBytes), lane(16);
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(at + i * kVectorBytes);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
  at += 4 * kVectorBytes;
  num_bytes -= 4 * kVectorBytes;
  __m512i by = broadcast(four_vectors);
  for (; num_bytes >= 4 * kVectorBytes;
       at += 4 * kVectorBytes, num_bytes -= 4 * kVectorBytes)
    for (int i = 0; i < 4; ++i) x[i] = folded(x[i], by, load(at + i * kVectorBytes));
  by = broadcast(vector);
  __m512i sum = x[0];
  for (int i = 1; i < 4; ++i) sum = folded(sum, by, x[i]);
  for (; num_bytes >= kVectorBytes; at += kVectorBytes, num_bytes -= kVectorBytes)
    sum = folded(sum, by, load(at));
  __m128i joined = _mm512_extracti32x4_epi32(sum, 0);
  joined = folded(joined, lane, _mm512_extracti32x4_epi32(sum, 1));
  joined = folded(joined, lane, _mm512_extracti32x4_epi32(sum, 2));
  joined = folded(joined, lane, _mm512_extracti32x4_epi32(sum, 3));
  uint64_t rest = _mm_crc32_u64(0, uint64_t(_mm_cvtsi128_si64(joined)));
  rest = _mm_crc32_u64(rest, uint64_t(_mm_extract_epi64(joined, 1)));
  return with_sse42(uint32_t(rest), at, num_bytes);
}

#endif

}  // namespace

uint32_t crc32c(const void* data, size_t num_bytes, uint32_t crc) {
  auto* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  static const bool has_vpclmul = has_sse42 && __builtin_cpu_supports("avx512f") &&
                                  __builtin_cpu_supports("vpclmulqdq");
  if (has_vpclmul && num_bytes >= kWorthVectors)
    return ~with_vpclmul(~crc, at, num_bytes);
  if (has_sse42) return ~with_sse42(~crc, at, num_bytes);
#endif
  return ~with_tables(~crc, at, num_bytes);
}

}  // namespace duck
