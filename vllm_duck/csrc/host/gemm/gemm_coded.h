// GEMM with a B that has e4m3 parts, in the order of additions of simd/segment_dot.h
// for any number of rows; groups of bf16 go through the kernels of gemm_vector.h or
// AMX. Include after the target pragma of the source that uses it; S is a class
// of simd/.
#pragma once

#include "host/gemm/gemm.h"
#include "simd/segment_dot.h"

namespace duck {
namespace host {
namespace {

// As many rows share the decoding of a segment where there are many.
constexpr int kCodedPanelRows = 64;

// The same GEMM, of some columns from `first` on.
inline Gemm columns_of(const Gemm& gemm, const PackedView& b, int first) {
  Gemm part = gemm;
  size_t size = gemm.out == Out::kFloat ? sizeof(float) : sizeof(uint16_t);
  part.b = b;
  part.c = static_cast<uint8_t*>(gemm.c) + first * size;
  if (gemm.residual) part.residual = gemm.residual + first;
  return part;
}

// Runs the groups of bf16 by G, and each stretch of others by coded(groups).
template <class G, class Coded>
void run_by_format(const Gemm& gemm, Range rows, Range groups, Arena* arena,
                   const Coded& coded) {
  for (int group = groups.begin; group < groups.end;) {
    const CodedGroup& first = gemm.b.coded->groups[group];
    if (!first.scales) {
      PackedView b = {reinterpret_cast<const uint16_t*>(first.weights), gemm.b.k,
                      first.count};
      G::run(columns_of(gemm, b, first.first), rows, {0, 1}, arena);
      ++group;
      continue;
    }
    int end = group + 1;
    while (end < groups.end && gemm.b.coded->groups[end].scales) ++end;
    coded(Range{group, end});
    group = end;
  }
}

// Rows of C, kBlockStride apart, for the two groups of a pair, or for one.
inline void finish_coded(const Gemm& gemm, int row, int num_rows, int group,
                         int num_groups, const float* c) {
  if (gemm.out == Out::kGated)
    return finish_block(gemm, row, num_rows, group, num_groups, c);
  for (int r = 0; r < num_rows; ++r, c += kBlockStride)
    for (int g = 0; g < num_groups; ++g) {
      const CodedGroup& at = gemm.b.coded->groups[group + g];
      finish_columns(gemm, row + r, at.first, at.count, c + g * kGroup);
    }
}

template <class S>
struct CodedGemm {
  typedef typename S::F F;
  static constexpr int kMaxRows = S::kWidth == 16 ? 8 : 4;

  template <class G>
  static void run(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    run_by_format<G>(gemm, rows, groups, arena, [&](Range coded) {
      if (rows.size() <= kMaxFewRows)
        run_few(gemm, rows, coded, arena);
      else
        for (int row = rows.begin; row < rows.end; row += kCodedPanelRows)
          run_panel(gemm, {row, min_int(row + kCodedPanelRows, rows.end)}, coded,
                    arena);
    });
  }

  // Each weight is decoded in registers.
  static void run_few(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    Arena::Mark mark = arena->mark();
    int stride = round_up(gemm.b.k, kTileK), num_rows = rows.size();
    auto* x = static_cast<float*>(arena->take(sizeof(float) * stride * kMaxFewRows));
    float unscale[kMaxFewRows];
    for (int r = 0; r < num_rows; ++r)
      unscale[r] = widen<S, Format::kE4m3>(gemm.a + (rows.begin + r) * gemm.a_stride,
                                           stride, x + r * stride);
    KAxis axis = gemm.b.coded_axis();
    alignas(64) float c[kMaxFewRows * kBlockStride];
    prefetch_beginning<S>(gemm.b.coded->groups[groups.begin].weights);
    for (int group = groups.begin; group < groups.end; group += 2) {
      int num_groups = min_int(2, groups.end - group);
      for (int g = 0; g < num_groups; ++g)
        for_row_chunks<S>(num_rows, [&](auto count, int first) {
          constexpr int R = decltype(count)::value;
          Inputs<R> inputs;
          for (int r = 0; r < R; ++r) {
            inputs.x[r] = x + (first + r) * stride;
            inputs.unscale[r] = unscale[first + r];
          }
          dot_few<R>(gemm.b.coded->groups[group + g], axis, inputs,
                     c + first * kBlockStride + g * kGroup);
        });
      finish_coded(gemm, rows.begin, num_rows, group, num_groups, c);
    }
    arena->release(mark);
  }

 private:
  template <int R>
  static void dot_few(const CodedGroup& group, const KAxis& axis,
                      const Inputs<R>& inputs, float* c) {
    alignas(64) float total[R][kGroup];
    clear<S, R>(total);
    SegmentCursor<Format::kE4m3> cursor = {group.weights, group.marks, nullptr};
    for (int s = 0, num_segments = axis.num_segments(); s < num_segments; ++s) {
      int k = axis.begin(s), num_k = round_up(axis.end(s) - k, kTileK);
      segment_dot<S, Format::kE4m3, R>(cursor, num_k, group.scales + s, inputs, k,
                                       total);
      cursor.advance(num_k);
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kGroup; i += S::kWidth)
        S::store(c + r * kBlockStride + i, S::load(&total[r][i]));
  }

  // Each segment is decoded once, and used for all rows.
  static void run_panel(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    Arena::Mark mark = arena->mark();
    int stride = round_up(gemm.b.k, kTileK), num_rows = rows.size();
    auto* x = static_cast<float*>(arena->take(sizeof(float) * stride * num_rows));
    for (int r = 0; r < num_rows; ++r) {
      const uint16_t* a = gemm.a + (rows.begin + r) * gemm.a_stride;
      for (int k = 0; k < stride; ++k) x[r * stride + k] = bf16_to_float(a[k]);
    }
    auto* c = static_cast<float*>(arena->take(sizeof(float) * num_rows * kBlockStride));
    for (int group = groups.begin; group < groups.end; group += 2) {
      int num_groups = min_int(2, groups.end - group);
      for (int g = 0; g < num_groups; ++g)
        dot_panel(gemm.b.coded->groups[group + g], gemm.b.coded_axis(), x, stride,
                  num_rows, c + g * kGroup);
      finish_coded(gemm, rows.begin, num_rows, group, num_groups, c);
    }
    arena->release(mark);
  }

  static void dot_panel(const CodedGroup& group, const KAxis& axis, const float* x,
                        int stride, int num_rows, float* c) {
    alignas(64) float weights[kScaleBlock * kGroup];
    for (int r = 0; r < num_rows; ++r)
      for (int i = 0; i < kGroup; i += S::kWidth)
        S::store(c + r * kBlockStride + i, S::zero());
    const uint8_t* codes = group.weights;
    for (int s = 0, num_segments = axis.num_segments(); s < num_segments; ++s) {
      int k = axis.begin(s), num_tiles = ceil_div(axis.end(s) - k, kTileK);
      decode(codes, num_tiles * kTileK, weights);
      codes += num_tiles * kTileElements;
      F scale = S::broadcast(group.scales[s]);
      int row = 0;
      for (; num_rows - row >= kMaxRows; row += kMaxRows)
        add_rows<kMaxRows>(x + row * stride + k, stride, weights, num_tiles, scale,
                           c + row * kBlockStride);
      for (; row < num_rows; ++row)
        add_rows<1>(x + row * stride + k, stride, weights, num_tiles, scale,
                    c + row * kBlockStride);
    }
  }

  // e4m3 [step][column] -> fp32 [k][16], times 2^-8.
  static void decode(const uint8_t* codes, int num_k, float* to) {
    for (int k = 0; k < num_k; k += kStepK)
      for (int column = 0; column < kGroup; column += S::kWidth) {
        F w[kStepK];
        S::template decode_e4m3<true>(codes + (k / kStepK * kGroup + column) * 4, w);
        for (int i = 0; i < kStepK; ++i) S::store(to + (k + i) * kGroup + column, w[i]);
      }
  }

  // c += scale * (segment . x) for R rows.
  template <int R>
  static void add_rows(const float* x, int stride, const float* weights, int num_tiles,
                       F scale, float* c) {
    for (int column = 0; column < kGroup; column += S::kWidth) {
      F acc[R];
      for (int r = 0; r < R; ++r) acc[r] = S::zero();
      for (int t = 0; t < num_tiles; ++t) {
        const float* at = x + t * kTileK;
        const float* w = weights + t * kTileElements + column;
        F even[R], odd[R];
        for (int r = 0; r < R; ++r) even[r] = odd[r] = S::zero();
#pragma GCC unroll 4
        for (int k = 0; k < kTileK; k += 2) {
          F first = S::load(w + k * kGroup), second = S::load(w + (k + 1) * kGroup);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const float* pair = at + r * stride + k;
            even[r] = S::add_exact_product(first, S::broadcast(pair[0]), even[r]);
            odd[r] = S::add_exact_product(second, S::broadcast(pair[1]), odd[r]);
          }
        }
        for (int r = 0; r < R; ++r) acc[r] = S::add(acc[r], S::add(even[r], odd[r]));
      }
      for (int r = 0; r < R; ++r) {
        float* out = c + r * kBlockStride + column;
        S::store(out, S::add(S::load(out), S::mul(scale, acc[r])));
      }
    }
  }
};

}  // namespace
}  // namespace host
}  // namespace duck
