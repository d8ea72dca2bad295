// The bytes of one token in the two paged caches; kv_format.py describes them.
// Include after the target pragma of the source that uses it.
#pragma once

#include "host/kernels/rows.h"
#include "simd/e4m3.h"

namespace duck {
namespace host {
namespace {

constexpr float kE4m3Max = 448.0f;

// How an instruction set reads the kScaleBlock e4m3 codes of one tile.
struct PlainDecode {
  // -> bf16(number * scale).
  static void scaled(const uint8_t* codes, float scale, uint16_t* out) {
    for (int i = 0; i < kScaleBlock; ++i)
      out[i] = bf16_from_float(e4m3_to_float(codes[i]) * scale);
  }
  // -> the numbers in bf16, exactly.
  static void exact(const uint8_t* codes, uint16_t* out) {
    for (int i = 0; i < kScaleBlock; ++i)
      out[i] = uint16_t(bits_from_float(e4m3_to_float(codes[i])) >> 16);
  }
};

// Writes n e4m3 codes and then n / 128 scales.
inline void quantize(const float* x, int n, uint8_t* out) {
  for (int tile = 0; tile < n / kScaleBlock; ++tile) {
    const float* at = x + tile * kScaleBlock;
    uint8_t* codes = out + tile * kScaleBlock;
    float scale = max_magnitude(at, kScaleBlock) / kE4m3Max;
    // Zeros, or so close to them that the scale is: nothing may divide by zero.
    if (!(scale > 0)) scale = 1.0f;
    for (int i = 0; i < kScaleBlock; ++i) {
      float value = at[i] / scale;
      value = value > kE4m3Max ? kE4m3Max : value;
      value = value < -kE4m3Max ? -kE4m3Max : value;
      codes[i] = e4m3_from_float(value);
    }
    std::memcpy(out + n + tile * sizeof scale, &scale, sizeof scale);
  }
}

struct LatentRow {
  int latent_dim, rope_dim;
  bool is_fp8;

  int rope_offset() const {
    if (!is_fp8) return 2 * latent_dim;
    return latent_dim + latent_dim / kScaleBlock * int(sizeof(float));
  }
  int bytes() const { return rope_offset() + 2 * rope_dim; }

  void write(const float* latent, const float* rope, uint8_t* out) const {
    if (is_fp8)
      quantize(latent, latent_dim, out);
    else
      narrow(latent, latent_dim, reinterpret_cast<uint16_t*>(out));
    narrow(rope, rope_dim, reinterpret_cast<uint16_t*>(out + rope_offset()));
  }

  // -> [latent | rope] bf16; an e4m3 number times its scale is rounded to bf16.
  template <class Decode>
  void read(const uint8_t* row, uint16_t* out) const {
    if (!is_fp8) {
      std::memcpy(out, row, size_t(bytes()));
      return;
    }
    for (int tile = 0; tile < latent_dim / kScaleBlock; ++tile) {
      float scale;
      std::memcpy(&scale, row + latent_dim + tile * sizeof scale, sizeof scale);
      Decode::scaled(row + tile * kScaleBlock, scale, out + tile * kScaleBlock);
    }
    std::memcpy(out + latent_dim, row + rope_offset(), size_t(2 * rope_dim));
  }
};

// An fp8 index key has one tile: its scale is left to the caller.
struct IndexRow {
  int dim;
  bool is_fp8;

  int bytes() const { return is_fp8 ? dim + int(sizeof(float)) : 2 * dim; }

  void write(const float* key, uint8_t* out) const {
    if (is_fp8)
      quantize(key, dim, out);
    else
      narrow(key, dim, reinterpret_cast<uint16_t*>(out));
  }

  // -> bf16, exactly; returns the scale.
  template <class Decode>
  float read(const uint8_t* row, uint16_t* out) const {
    if (!is_fp8) {
      std::memcpy(out, row, size_t(2 * dim));
      return 1.0f;
    }
    Decode::exact(row, out);
    float scale;
    std::memcpy(&scale, row + dim, sizeof scale);
    return scale;
  }
};

}  // namespace
}  // namespace host
}  // namespace duck
