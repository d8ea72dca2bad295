// Norm, linear, MLP and the sum at the end of a layer.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/gemm/parallel.h"
#include "host/kernels/kernels.h"
#include "host/kernels/rows.h"

namespace duck {
namespace host {
namespace {

// x [rows][size] bf16 -> out, rows `out_stride` apart.
inline void norm_rows(const Threads& threads, const NormCall& call, size_t out_stride) {
  for_rows(threads, call.rows, size_t(call.size) * 8, [&](Range rows, Arena* arena) {
    Arena::Mark mark = arena->mark();
    float* wide = take_floats(arena, call.size);
    for (int r = rows.begin; r < rows.end; ++r) {
      widen(call.x + size_t(r) * call.size, call.size, wide);
      rms_norm(wide, call.norm.weight, call.size, call.norm.eps,
               call.out + r * out_stride);
    }
    arena->release(mark);
  });
}

inline void norm_call(const Threads& threads, const NormCall& call) {
  norm_rows(threads, call, call.size);
}

// Rows that go through a linear, the router or an MLP together: bounds the scratch.
constexpr int kDenseRows = 512;

template <class G>
void linear_call(const Threads& threads, const LinearCall& call) {
  size_t n = call.weight.n, k = call.weight.k;
  size_t row_bytes = n * (call.is_bf16 ? sizeof(uint16_t) : sizeof(float));
  for (int begin = 0; begin < call.rows; begin += kDenseRows) {
    int rows = min_int(kDenseRows, call.rows - begin);
    Arena::Mark mark = threads.shared->mark();
    Rows x = copy_rows(threads.shared, call.x + begin * k, rows, int(k));
    run_gemm<G>(threads, {x.data, x.stride, rows, call.weight,
                          call.is_bf16 ? Out::kBf16 : Out::kFloat,
                          static_cast<uint8_t*>(call.out) + begin * row_bytes, n});
    threads.shared->release(mark);
  }
}

template <class G>
void mlp_call(const Threads& threads, const MlpCall& call) {
  size_t hidden = call.down.n;
  for (int begin = 0; begin < call.rows; begin += kDenseRows) {
    int rows = min_int(kDenseRows, call.rows - begin);
    Arena::Mark mark = threads.shared->mark();
    Rows x = copy_rows(threads.shared, call.x + begin * hidden, rows, int(hidden));
    // Whole groups: the columns past the last are silu(0) * 0.
    Rows act = take_rows(threads.shared, rows, round_up(call.columns, kGroup));
    run_gemm<G>(threads, {x.data, x.stride, rows, call.gate_up, Out::kGated, act.data,
                          act.stride});
    Gemm down = {act.data, act.stride, rows, call.down, Out::kFloat, nullptr, hidden};
    if (call.residual) {
      down.out = Out::kResidual;
      down.c = call.out_bf16 + begin * hidden;
      down.residual = call.residual + begin * hidden;
      down.residual_stride = hidden;
    } else {
      down.c = call.out_float + begin * hidden;
    }
    run_gemm<G>(threads, down);
    threads.shared->release(mark);
  }
}

inline void add_call(const Threads& threads, const AddCall& call) {
  constexpr int kChunk = 4096;
  int chunks = int((call.size + kChunk - 1) / kChunk);
  for_rows(threads, chunks, kChunk * 4, [&](Range range, Arena*) {
    size_t begin = size_t(range.begin) * kChunk, end = size_t(range.end) * kChunk;
    if (end > call.size) end = call.size;
    for (size_t i = begin; i < end; ++i)
      call.out[i] = bf16_from_float(bf16_to_float(call.residual[i]) +
                                    (call.shared[i] + call.routed[i]));
  });
}

}  // namespace
}  // namespace host
}  // namespace duck
