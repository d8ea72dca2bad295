#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
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

#endif

}  // namespace

uint32_t crc32c(const void* data, size_t num_bytes, uint32_t crc) {
  auto* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return ~with_sse42(~crc, at, num_bytes);
#endif
  return ~with_tables(~crc, at, num_bytes);
}

}  // namespace duck
