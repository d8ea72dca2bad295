// Re-quantises one matrix of a checkpoint, group by group along k.
#pragma once

#include "duck/kernels/layout.h"

namespace duck {

// A matrix [rows][k] of e4m3 with fp32 scales for 128 x 128 blocks, or of bf16.
struct QuantizeSource {
  Format format;
  const uint8_t* data;
  ptrdiff_t row_bytes;
  const float* scales;  // [blocks of rows][blocks of k]
  int num_rows;
  int row_offset;  // of row 0 within its block of 128
  int num_k;
  int k_offset;  // of k = 0, counted from the start of a block of 128
};

// `codes` [rows][k] int8, or two int4 a byte with the even k below; `scales` bf16
// [rows][segments]. Each weight becomes code * scale:
//   int8  scale = bf16(largest / 127)
//   int4  scale = bf16(-largest / 8), largest with its sign: its code is -8
// A group whose scale is below 2^-126 is all zeros. Every machine gives the same bits.
// Returns false if a weight is NaN, infinite, or beyond fp32 once scaled.
bool quantize(const QuantizeSource& source, Format format, uint8_t* codes,
              uint16_t* scales);

}  // namespace duck
