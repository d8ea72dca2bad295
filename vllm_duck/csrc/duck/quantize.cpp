#include "duck/quantize.h"

#include <cmath>
#include <vector>

#include "simd/bf16.h"
#include "simd/e4m3.h"

namespace duck {
namespace {

constexpr float kSmallestStep = 0x1p-126f;

// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
constexpr float kRound = 12582912.0f;

struct E4m3Table {
  float values[256];
  E4m3Table() {
    for (int code = 0; code < 256; ++code) values[code] = e4m3_to_float(uint8_t(code));
  }
};

void widen_row(const QuantizeSource& source, int row, float* out) {
  static const E4m3Table table;
  const uint8_t* data = source.data + row * source.row_bytes;
  if (source.format == Format::kBf16) {
    auto* bits = reinterpret_cast<const uint16_t*>(data);
    for (int k = 0; k < source.num_k; ++k) out[k] = bf16_to_float(bits[k]);
    return;
  }
  KAxis blocks(source.num_k, source.k_offset, Format::kE4m3);
  const float* scales = source.scales + size_t(source.row_offset + row) / kScaleBlock *
                                            blocks.num_segments();
  for (int s = 0; s < blocks.num_segments(); ++s)
    for (int k = blocks.begin(s); k < blocks.end(s); ++k)
      out[k] = table.values[data[k]] * scales[s];
}

// The first element of the largest magnitude; NaN or infinity if there is one. Compares
// bits, because compilers do not reorder comparisons of floats.
float largest(const float* values, int count) {
  int32_t most = 0;
  for (int i = 0; i < count; ++i) {
    int32_t magnitude = int32_t(bits_from_float(values[i]) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  for (int i = 0; i < count; ++i)
    if (int32_t(bits_from_float(values[i]) & 0x7fffffffu) == most) return values[i];
  return 0;
}

uint16_t step_of(float peak, Format format) {
  float step = format == Format::kInt8 ? std::fabs(peak) / 127.0f : peak / -8.0f;
  return std::fabs(step) < kSmallestStep ? uint16_t(0) : bf16_from_float(step);
}

// The low mantissa bits of kRound + x are the integer nearest to x.
void encode(const float* values, int count, float step, int low, int high,
            int8_t* codes) {
  float inverse = step == 0 ? 0.0f : 1.0f / step;
  for (int i = 0; i < count; ++i) {
    int code = int(bits_from_float(values[i] * inverse + kRound)) -
               int(bits_from_float(kRound));
    code = code < low ? low : code;
    codes[i] = int8_t(code > high ? high : code);
  }
}

}  // namespace

bool quantize(const QuantizeSource& source, Format format, uint8_t* codes,
              uint16_t* scales) {
  KAxis groups(source.num_k, source.k_offset, format);
  bool is_int4 = format == Format::kInt4;
  std::vector<float> values(source.num_k);
  std::vector<int8_t> row_codes(source.num_k);
  for (int row = 0; row < source.num_rows; ++row) {
    widen_row(source, row, values.data());
    for (int g = 0; g < groups.num_segments(); ++g) {
      int begin = groups.begin(g), count = groups.end(g) - begin;
      float peak = largest(values.data() + begin, count);
      if (!std::isfinite(peak)) return false;
      uint16_t step = step_of(peak, format);
      *scales++ = step;
      encode(values.data() + begin, count, bf16_to_float(step), is_int4 ? -8 : -127,
             is_int4 ? 7 : 127, row_codes.data() + begin);
    }
    if (is_int4)
      for (int k = 0; k < source.num_k; k += 2)
        *codes++ = uint8_t((row_codes[k] & 0x0f) | (row_codes[k + 1] << 4));
    else
      for (int k = 0; k < source.num_k; ++k) *codes++ = uint8_t(row_codes[k]);
  }
  return true;
}

}  // namespace duck
