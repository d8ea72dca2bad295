// GEMM with vectors of fp32: S is a class of simd/.
// Include after the target pragma of the source that uses it.
#pragma once

#include "host/gemm/gemm_coded.h"

namespace duck {
namespace host {
namespace {

template <class S>
struct VectorGemm {
  typedef typename S::F F;
  // Even and odd chains of each row, and two weights, must fit in the registers.
  static constexpr int kMaxRows = S::kWidth == 16 ? 8 : 4;

  // One share of a GEMM: `rows` x `groups` (an even first group if gated).
  static void run(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    if (gemm.b.coded)
      return CodedGemm<S>::template run<VectorGemm>(gemm, rows, groups, arena);
    Arena::Mark mark = arena->mark();
    int padded_k = gemm.b.k_tiles() * kTileK;
    auto* x = static_cast<float*>(arena->take(sizeof(float) * padded_k * kMaxRows));
    int row = rows.begin;
    for (; rows.end - row >= kMaxRows; row += kMaxRows)
      run_rows<kMaxRows>(gemm, row, groups, x);
    for (; rows.end - row >= 2; row += 2) run_rows<2>(gemm, row, groups, x);
    if (row < rows.end) run_rows<1>(gemm, row, groups, x);
    arena->release(mark);
  }

 private:
  template <int R>
  static void run_rows(const Gemm& gemm, int row, Range groups, float* x) {
    int k_tiles = gemm.b.k_tiles(), padded_k = k_tiles * kTileK;
    for (int r = 0; r < R; ++r) {
      const uint16_t* a = gemm.a + (row + r) * gemm.a_stride;
      for (int k = 0; k < padded_k; ++k) x[r * padded_k + k] = bf16_to_float(a[k]);
    }
    alignas(64) float c[R * kBlockStride];
    for (int group = groups.begin; group < groups.end; group += 2) {
      int num_groups = min_int(2, groups.end - group);
      for (int g = 0; g < num_groups; ++g)
        dot<R>(x, gemm.b.group(group + g), k_tiles, c + g * kGroup);
      finish_block(gemm, row, R, group, num_groups, c);
    }
  }

  // R rows of x times one group.
  template <int R>
  static void dot(const float* x, const uint16_t* group, int k_tiles, float* c) {
    int padded_k = k_tiles * kTileK;
    for (int column = 0; column < kGroup; column += S::kWidth) {
      F total[R];
      for (int r = 0; r < R; ++r) total[r] = S::zero();
      for (int t = 0; t < k_tiles; ++t) {
        const uint16_t* tile = group + t * kTileElements + column * 2;
        const float* at = x + t * kTileK;
        F even[R], odd[R];
        for (int r = 0; r < R; ++r) even[r] = odd[r] = S::zero();
#pragma GCC unroll 4
        for (int pair = 0; pair < kTileK / 2; ++pair) {
          F w[2];
          S::decode_bf16(reinterpret_cast<const uint8_t*>(tile + pair * 2 * kGroup), w);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const float* pair_at = at + r * padded_k + 2 * pair;
            even[r] = S::add_exact_product(w[0], S::broadcast(pair_at[0]), even[r]);
            odd[r] = S::add_exact_product(w[1], S::broadcast(pair_at[1]), odd[r]);
          }
        }
        for (int r = 0; r < R; ++r)
          total[r] = S::add(total[r], S::add(even[r], odd[r]));
      }
      for (int r = 0; r < R; ++r) S::store(c + r * kBlockStride + column, total[r]);
    }
  }
};

}  // namespace
}  // namespace host
}  // namespace duck
