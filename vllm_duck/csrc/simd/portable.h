// Four fp32 numbers in the compiler's vector extension: SSE2, NEON or plain code.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/inline.h"

namespace duck {
namespace {

struct PortableSimd {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;

  static F zero() { return F{}; }
  static F broadcast(float value) { return F{value, value, value, value}; }
  static F broadcast_from(const float* at) { return broadcast(*at); }
  static F load(const float* at) {
    F value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  static void store(float* at, F value) { std::memcpy(at, &value, sizeof value); }
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  // For exact products only, where it equals a fused multiply-add.
  static F add_exact_product(F a, F b, F sum) { return sum + a * b; }

  DUCK_INLINE static void prefetch(const void* at) { __builtin_prefetch(at); }
  DUCK_INLINE static void prefetch_far(const void* at) { __builtin_prefetch(at, 0, 2); }

  static constexpr float kInputScale = 1;

  // One dword of four e4m3 codes for each column -> the step's four k, times 2^-8.
  template <bool kAnyZeroExponent>
  static void decode_e4m3(const uint8_t* at, F w[4]) {
    I codes;
    std::memcpy(&codes, at, sizeof codes);
    w[0] = widen<kAnyZeroExponent>(codes << 24);
    w[1] = widen<kAnyZeroExponent>(codes << 8);
    w[2] = widen<kAnyZeroExponent>(codes << 16);
    w[3] = widen<kAnyZeroExponent>(codes);
  }

  // To look would take as long as to decode.
  static bool any_zero_exponent(const uint8_t*) { return true; }

  // One dword of two bf16 for each column.
  static void decode_bf16(const uint8_t* at, F w[2]) {
    I codes;
    std::memcpy(&codes, at, sizeof codes);
    w[0] = F(codes << 16);
    w[1] = F(codes & int32_t(0xffff0000u));
  }

  // One dword of four codes plus 128 for each column, as for e4m3.
  static void decode_int8(const uint8_t* at, F w[4]) {
    I codes;
    std::memcpy(&codes, at, sizeof codes);
    codes ^= int32_t(0x80808080u);
    w[0] = signed_top(codes << 24, 24);
    w[1] = signed_top(codes << 8, 24);
    w[2] = signed_top(codes << 16, 24);
    w[3] = signed_top(codes, 24);
  }

  // Two bytes of four codes for each column and the first step, then for the second.
  static void decode_int4(const uint8_t* at, F w[8]) {
    for (int step = 0; step < 2; ++step, w += 4) {
      uint16_t pairs[kWidth];
      std::memcpy(pairs, at + step * sizeof pairs, sizeof pairs);
      I codes = {pairs[0], pairs[1], pairs[2], pairs[3]};
      w[0] = signed_top(codes << 28, 28);
      w[1] = signed_top(codes << 20, 28);
      w[2] = signed_top(codes << 24, 28);
      w[3] = signed_top(codes << 16, 28);
    }
  }

  static F load_bf16(const uint16_t* at) {
    return F(I{at[0], at[1], at[2], at[3]} << 16);
  }

 private:
  static F signed_top(I codes, int shift) {
    return __builtin_convertvector(codes >> shift, F);
  }
  // The code in the top byte -> fp32: the arithmetic shift puts exponent and mantissa
  // in place, or-ing 0x70 into the exponent adds 112.
  template <bool kAnyZeroExponent>
  static F widen(I top) {
    I bits = ((top >> 4) & int32_t(0x87f00000u)) | 0x38000000;
    if (!kAnyZeroExponent) return F(bits);
    // An exponent field of zero has no implicit one: what was read as
    // 2^-15 * (1 + m/8) is 2^-14 * m/8, so add it once more, less 2^-14.
    I unit = (top & int32_t(0x80000000u)) | 0x38800000;
    I is_subnormal = (top & 0x78000000) == 0;
    F correction = F(bits) - F(unit);
    return F(bits) + F(I(correction) & is_subnormal);
  }
};

}  // namespace
}  // namespace duck
