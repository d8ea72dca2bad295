// The prefill regime on fp32 vectors: a segment of weights is decoded once into the L1
// cache and multiplied with all rows of the expert, kRows rows and two matrices at a
// time. The order of additions is that of few_rows.h.
// Include after the target pragma; S is a class of simd/.
#pragma once

#include <cstring>

#include "duck/kernels/few_rows.h"

namespace duck {
namespace {

// Column groups that share one copy of the activations.
constexpr int kManyGroups = 4;

// Two accumulators (even, odd) for two matrices and each row, and what feeds them, must
// fit the registers: 6 rows for 32 registers, 3 for 16.
template <class S>
constexpr int kRowsAtOnce = S::kRegisters >= 32 ? 6 : 3;

template <class S>
constexpr int padded_rows(int num_rows) {
  return round_up(num_rows, kRowsAtOnce<S>);
}

// One segment of one matrix as fp32 [k][16], padded with zeros to a whole tile.
using SegmentFloats = float[kScaleBlock][kGroup];

template <class S, Format kFormat>
void decode_segment(const uint8_t* segment, int num_k, SegmentFloats out) {
  constexpr int kUnitK = unit_k(kFormat);
  for (int unit = 0; unit * kUnitK < num_k; ++unit)
    for (int column = 0; column < kGroup; column += S::kWidth) {
      typename S::F w[kUnitK];
      decode_unit<S, kFormat, true>(segment, unit, column, w);
      for (int i = 0; i < kUnitK; ++i) S::store(&out[unit * kUnitK + i][column], w[i]);
    }
  for (int k = num_k; k % kTileK != 0; ++k)
    for (int i = 0; i < kGroup; ++i) out[k][i] = 0;
}

// acc[row][matrix][16] += tile . x[row] for kRows rows.
template <class S, int kRows>
inline void multiply_tile(const float (*w0)[kGroup], const float (*w1)[kGroup],
                          const float* x, size_t x_stride, float* acc) {
  using F = typename S::F;
  for (int column = 0; column < kGroup; column += S::kWidth) {
    F sums[2][kRows][2];
    for (auto& parity : sums)
      for (auto& row : parity) row[0] = row[1] = S::zero();
    for (int k = 0; k < kTileK; k += 2) {
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        F a = S::load(&w0[k + p][column]), b = S::load(&w1[k + p][column]);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          F value = S::broadcast(x[r * x_stride + k + p]);
          sums[p][r][0] = S::add_exact_product(a, value, sums[p][r][0]);
          sums[p][r][1] = S::add_exact_product(b, value, sums[p][r][1]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
      for (int m = 0; m < 2; ++m) {
        float* at = acc + (2 * r + m) * kGroup + column;
        S::store(at, S::add(S::load(at), S::add(sums[0][r][m], sums[1][r][m])));
      }
  }
}

// total[row][matrix][16] += scale * (segment . x[row]) for all rows.
template <class S, Format kFormat>
void multiply_segment(const SegmentFloats w[2], int num_k, const SegmentScale scales[2],
                      const float* x, size_t x_stride, int num_rows, float* total) {
  constexpr int kRows = kRowsAtOnce<S>;
  for (int row = 0; row < num_rows; row += kRows) {
    alignas(64) float acc[kRows * 2 * kGroup];
    for (int i = 0; i < kRows * 2 * kGroup; i += S::kWidth)
      S::store(acc + i, S::zero());
    for (int k = 0; k < num_k; k += kTileK)
      multiply_tile<S, kRows>(w[0] + k, w[1] + k, x + row * x_stride + k, x_stride,
                              acc);
    float* at = total + size_t(row) * 2 * kGroup;
    for (int i = 0; i < kRows * 2 * kGroup; i += S::kWidth) {
      auto scale = scale_at<S, kFormat>(scales[i / kGroup % 2], i % kGroup);
      S::store(at + i, S::add(S::load(at + i), S::mul(scale, S::load(acc + i))));
    }
  }
}

struct ManyScratch {
  SegmentFloats* w;  // [2]
  float* x;          // one segment of the inputs, or all activations; fp32, padded
  float* totals;     // [group][padded row][2][16]

  ManyScratch(uint8_t* scratch, size_t x_floats)
      : w(reinterpret_cast<SegmentFloats*>(scratch)),
        x(reinterpret_cast<float*>(scratch + 2 * sizeof(SegmentFloats))),
        totals(x + round_up(int(x_floats), 16)) {}
  static size_t bytes(size_t x_floats, size_t total_floats) {
    return 2 * sizeof(SegmentFloats) + (x_floats + total_floats + 16) * sizeof(float);
  }
};

// fp32 copies of num_k values of each row, padded with zeros to `padded_k`.
inline void widen_rows(const ExpertRows& rows, const uint16_t* hidden, int k, int num_k,
                       int padded_k, float* out) {
  size_t stride = rows.expert.shape->hidden_size;
  for (int r = 0; r < rows.num_rows; ++r, out += padded_k) {
    const uint16_t* row = hidden + rows.tokens[r] * stride + k;
    for (int i = 0; i < num_k; ++i) out[i] = bf16_to_float(row[i]);
    for (int i = num_k; i < padded_k; ++i) out[i] = 0;
  }
}

template <class S, Format kFormat>
void gate_up_many(const ExpertRows& rows, int begin, int end, const HiddenRows& hidden,
                  uint8_t* scratch_at) {
  const ExpertView& expert = rows.expert;
  const LayerShape& shape = *expert.shape;
  KAxis axis = shape.gate_up_axis();
  int num_rows = padded_rows<S>(rows.num_rows);
  ManyScratch scratch(scratch_at, size_t(num_rows) * kScaleBlock);
  size_t group_floats = size_t(num_rows) * 2 * kGroup;
  for (int first = begin; first < end; first += kManyGroups) {
    int groups = end - first < kManyGroups ? end - first : kManyGroups;
    std::memset(scratch.totals, 0, groups * group_floats * sizeof(float));
    for (int s = 0; s < axis.num_segments(); ++s) {
      int k = axis.begin(s), num_k = axis.end(s) - k;
      int padded_k = round_up(num_k, kTileK);
      widen_rows(rows, hidden.bf16, k, num_k, padded_k, scratch.x);
      for (int g = 0; g < groups; ++g) {
        const uint8_t* from =
            expert.gate_up(first + g) + packed_bytes(kFormat, kGroup * 2 * k);
        size_t bytes = packed_bytes(kFormat, kGroup * num_k);
        decode_segment<S, kFormat>(from, num_k, scratch.w[0]);
        decode_segment<S, kFormat>(from + bytes, num_k, scratch.w[1]);
        SegmentScale scales[2] = {expert.gate_up_scale(first + g, s, 0),
                                  expert.gate_up_scale(first + g, s, 1)};
        multiply_segment<S, kFormat>(scratch.w, num_k, scales, scratch.x, padded_k,
                                     num_rows, scratch.totals + g * group_floats);
      }
    }
    for (int g = 0; g < groups; ++g) {
      uint16_t* act = rows.act + shape.act_offset(first + g);
      const float* total = scratch.totals + g * group_floats;
      for (int r = 0; r < rows.num_rows; ++r, total += 2 * kGroup)
        silu_mul_group(total, total + kGroup, act + size_t(r) * shape.act_stride());
    }
  }
}

// Groups come in pairs, one in the place of gate and one in that of up.
template <class S, Format kFormat>
void down_many(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
               uint8_t* scratch_at) {
  const ExpertView& expert = rows.expert;
  const LayerShape& shape = *expert.shape;
  KAxis axis = shape.down_axis();
  int num_rows = padded_rows<S>(rows.num_rows), stride = shape.act_stride();
  ManyScratch scratch(scratch_at, size_t(num_rows) * stride);
  for (size_t i = 0; i < size_t(rows.num_rows) * stride; ++i)
    scratch.x[i] = bf16_to_float(rows.act[i]);
  for (int group = begin; group < end; group += 2, y += 2 * kGroup) {
    int second = group + 1 < end ? group + 1 : group;
    std::memset(scratch.totals, 0, size_t(num_rows) * 2 * kGroup * sizeof(float));
    for (int s = 0; s < axis.num_segments(); ++s) {
      int num_k = axis.end(s) - axis.begin(s);
      size_t at = packed_bytes(kFormat, kGroup * axis.begin(s));
      decode_segment<S, kFormat>(expert.down(group) + at, num_k, scratch.w[0]);
      decode_segment<S, kFormat>(expert.down(second) + at, num_k, scratch.w[1]);
      SegmentScale scales[2] = {expert.down_scale(group, s),
                                expert.down_scale(second, s)};
      multiply_segment<S, kFormat>(scratch.w, num_k, scales,
                                   scratch.x + axis.padded_begin(s), stride, num_rows,
                                   scratch.totals);
    }
    for (int r = 0; r < rows.num_rows; ++r) {
      float* out = y + rows.tokens[r] * y_stride;
      const float* total = scratch.totals + size_t(r) * 2 * kGroup;
      add_weighted_group<S>(rows.weights[r], total, out);
      if (second != group)
        add_weighted_group<S>(rows.weights[r], total + kGroup, out + kGroup);
    }
  }
}

}  // namespace
}  // namespace duck
