// What the kernels of one instruction set offer to the rest: a table of functions.
//
// The numerics, the same for every instruction set, row count and thread count:
//   tile    over 32 k: e = sum of the even k, o = sum of the odd k, each an fp32 chain
//           in rising k that starts at 0; a product of a weight and a bf16 activation
//           is exact in fp32, so a fused and a separate multiply-add give equal bits
//           (but for products below 2^-126, of which only the fused one keeps any).
//   segment acc = acc + (e + o), tile after tile.
//   dot     total = total + scale * acc, segment after segment, product rounded.
//   act     bf16(silu(gate) * up), gate and up in fp32.
//   row     y = y + topk_weight * dot, experts in rising id, then rising slot.
// This is the order of AMX's TDPBF16PS; sources with other instructions follow it.
// Every source is compiled with -ffp-contract=off.
#pragma once

#include "duck/kernels/layout.h"

namespace duck {

// The rows of a call that chose one expert: row r is token tokens[r] with topk weight
// weights[r]; its activation is row r of `act`.
struct ExpertRows {
  ExpertView expert;
  int num_rows;
  const int* tokens;
  const float* weights;
  uint16_t* act;  // [num_rows][shape.act_stride()] bf16, padding is zero
};

// The call's input in both forms.
struct HiddenRows {
  const uint16_t* bf16;  // [T][hidden]
  const float* fp32;     // [T][hidden] as KernelTable::widen makes them; only rows of
                         // experts with few rows are filled
  const float* unscale;  // [T] what it returned
};

struct KernelTable {
  const char* name;
  // An expert with at most this many rows reads HiddenRows::fp32.
  int few_rows;
  // Makes the fp32 copies of `num` bf16 activations that weights of this format want,
  // maybe times a power of two. Returns the factor that takes it back.
  float (*widen)(Format format, const uint16_t* from, size_t num, float* to);
  // Bytes of scratch that one worker needs, 64-byte aligned.
  size_t (*scratch_bytes)(const LayerShape& shape, int max_rows);
  // rows.act for column groups [begin, end).
  void (*gate_up)(const ExpertRows& rows, int begin, int end, const HiddenRows& hidden,
                  uint8_t* scratch);
  // Adds to y[token * y_stride + hidden index - 16 * begin] for hidden groups
  // [begin, end).
  void (*down)(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
               uint8_t* scratch);
  // Runs on each worker after its part of a phase; may be null.
  void (*leave)();
};

const KernelTable* portable_kernels();
// Null when this build or this CPU has no such instructions.
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* amx_kernels();

}  // namespace duck
