// bf16 as bits: exact widening, and rounding to nearest even that keeps NaN a NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace duck {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bf16_to_float(uint16_t bits) {
  return float_from_bits(uint32_t(bits) << 16);
}

inline uint16_t bf16_from_float(float value) {
  uint32_t bits = bits_from_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could carry a NaN's mantissa away.
  return value != value ? uint16_t(0x7fc0u) : uint16_t(rounded);
}

}  // namespace duck
