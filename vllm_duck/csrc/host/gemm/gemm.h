// C = A . B for bf16 A [rows][k] and a packed B, and what becomes of C.
//
// The order of additions, the same for every instruction set, row count and thread
// count (it is that of AMX's TDPBF16PS, and of the ducks' kernel):
//   tile   over 32 k: e = sum of the even k, o = sum of the odd k, each an fp32 chain
//          in rising k that starts at 0; products of bf16 are exact in fp32, so fused
//          and separate multiply-adds give equal bits.
//   total  c = c + (e + o), tile after tile.
// A B with e4m3 parts has another order for them: simd/segment_dot.h.
// Denormals count as zero. Sources are compiled with -ffp-contract=off.
//
// A's rows are padded with zeros to a multiple of 32, and kSlackRows readable rows
// follow the last one: what they hold does not matter.
// Include after the target pragma of the source that uses it.
#pragma once

#include "base/arena.h"
#include "host/gemm/packed.h"
#include "simd/silu.h"

namespace duck {
namespace host {
namespace {

constexpr int kSlackRows = 15;
// Floats from one row of a block of C to the next: two groups.
constexpr int kBlockStride = 2 * kGroup;

inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

enum class Out {
  kFloat,     // c: fp32
  kBf16,      // c: bf16
  kResidual,  // c: bf16(residual + C), residual of the layout of c
  kGated,     // c: bf16(silu(gate) * up), B from pack_gate_up; n is twice c's columns
};

struct Gemm {
  const uint16_t* a;
  size_t a_stride;  // elements
  int rows;
  PackedView b;
  Out out;
  void* c;
  size_t c_stride;  // elements
  const uint16_t* residual = nullptr;
  size_t residual_stride = 0;
};

struct Range {
  int begin, end;
  int size() const { return end - begin; }
};

// Takes `count` <= 16 columns of a row of C, from `first` on.
inline void finish_columns(const Gemm& gemm, int row, int first, int count,
                           const float* c) {
  size_t at = size_t(row) * gemm.c_stride + first;
  if (gemm.out == Out::kFloat) {
    auto* out = static_cast<float*>(gemm.c) + at;
    if (count == kGroup)
      for (int i = 0; i < kGroup; ++i) out[i] = c[i];
    else
      for (int i = 0; i < count; ++i) out[i] = c[i];
    return;
  }
  alignas(64) uint16_t rounded[kGroup];
  if (gemm.out == Out::kResidual) {
    const uint16_t* residual = gemm.residual + row * gemm.residual_stride + first;
    alignas(64) uint16_t old[kGroup] = {};
    if (count == kGroup)
      for (int i = 0; i < kGroup; ++i) old[i] = residual[i];
    else
      for (int i = 0; i < count; ++i) old[i] = residual[i];
    for (int i = 0; i < kGroup; ++i)
      rounded[i] = bf16_from_float(bf16_to_float(old[i]) + c[i]);
  } else {
    for (int i = 0; i < kGroup; ++i) rounded[i] = bf16_from_float(c[i]);
  }
  auto* out = static_cast<uint16_t*>(gemm.c) + at;
  if (count == kGroup)
    for (int i = 0; i < kGroup; ++i) out[i] = rounded[i];
  else
    for (int i = 0; i < count; ++i) out[i] = rounded[i];
}

// Takes a block of C: rows [row, row + num_rows), one or two groups from `group` on.
inline void finish_block(const Gemm& gemm, int row, int num_rows, int group,
                         int num_groups, const float* c) {
  for (int r = 0; r < num_rows; ++r, c += kBlockStride) {
    if (gemm.out == Out::kGated) {
      auto* out = static_cast<uint16_t*>(gemm.c);
      silu_mul_group(c, c + kGroup,
                     out + size_t(row + r) * gemm.c_stride + group / 2 * kGroup);
      continue;
    }
    for (int g = 0; g < num_groups; ++g) {
      int first = (group + g) * kGroup;
      finish_columns(gemm, row + r, first, min_int(gemm.b.n - first, kGroup),
                     c + g * kGroup);
    }
  }
}

}  // namespace
}  // namespace host
}  // namespace duck
