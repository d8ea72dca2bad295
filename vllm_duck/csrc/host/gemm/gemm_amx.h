// GEMM with AMX tiles, for any number of rows.
// Include after the target pragma of the source that uses it.
#pragma once

#include <immintrin.h>

#include "host/gemm/gemm_coded.h"
#include "simd/amx_tiles.h"
#include "simd/avx512.h"

namespace duck {
namespace host {
namespace {

struct AmxGemm {
  // One share of a GEMM: `rows` x `groups` (an even first group if gated).
  static void run(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    if (gemm.b.coded) return run_coded(gemm, rows, groups, arena);
    // As even as possible: 17 rows are two tiles of 9, not one of 16 and one of 1.
    int num_tiles = ceil_div(rows.size(), kTileRows);
    if (num_tiles == 0) return;
    int per_tile = ceil_div(rows.size(), num_tiles);
    tile_configure(per_tile);
    alignas(64) float c[2 * kTileRows * kBlockStride];
    for (int group = groups.begin; group < groups.end; group += 2) {
      int num_groups = min_int(2, groups.end - group);
      for (int row = rows.begin; row < rows.end; row += 2 * per_tile) {
        int num_rows = min_int(2 * per_tile, rows.end - row);
        int row_tiles = num_rows > per_tile ? 2 : 1;
        bool is_whole = (group + num_groups) * kGroup <= gemm.b.n;
        // Whole tiles of fp32 go straight to where they belong.
        if (is_whole && gemm.out == Out::kFloat && num_rows == row_tiles * per_tile) {
          float* out = static_cast<float*>(gemm.c) + row * gemm.c_stride;
          multiply_any(gemm, row, per_tile, row_tiles, group, num_groups,
                       {out + group * kGroup, gemm.c_stride});
          continue;
        }
        multiply_any(gemm, row, per_tile, row_tiles, group, num_groups,
                     {c, kBlockStride});
        if (is_whole && gemm.out == Out::kBf16 && num_groups == 2)
          store_bf16(gemm, row, num_rows, group, c);
        else
          finish_block(gemm, row, num_rows, group, num_groups, c);
      }
    }
    tile_release();
  }

 private:
  struct Block {
    float* c;
    size_t stride;
  };

  static void run_coded(const Gemm& gemm, Range rows, Range groups, Arena* arena) {
    run_by_format<AmxGemm>(gemm, rows, groups, arena, [&](Range coded) {
      if (rows.size() <= kMaxFewRows)
        CodedGemm<Avx512Simd>::run_few(gemm, rows, coded, arena);
      else
        for (int row = rows.begin; row < rows.end; row += kCodedPanelRows)
          run_panel(gemm, {row, min_int(row + kCodedPanelRows, rows.end)}, coded);
    });
  }

  // Each segment is decoded to bf16 tiles once, and used for all rows.
  static void run_panel(const Gemm& gemm, Range rows, Range groups) {
    int per_tile = ceil_div(rows.size(), ceil_div(rows.size(), kTileRows));
    tile_configure(per_tile);
    KAxis axis = gemm.b.coded_axis();
    alignas(64) float c[kCodedPanelRows * kBlockStride];
    alignas(64) float block[2 * kTileRows * kBlockStride];
    alignas(64) uint16_t tiles[2][kScaleBlock * kGroup];
    for (int group = groups.begin; group < groups.end; group += 2) {
      int num_groups = min_int(2, groups.end - group);
      const CodedGroup* at = gemm.b.coded->groups + group;
      const uint8_t* codes[2] = {at[0].weights, at[num_groups - 1].weights};
      for (int i = 0; i < rows.size() * kBlockStride; ++i) c[i] = 0.0f;
      for (int s = 0, num_segments = axis.num_segments(); s < num_segments; ++s) {
        int k = axis.begin(s), num_tiles = ceil_div(axis.end(s) - k, kTileK);
        for (int g = 0; g < num_groups; ++g) {
          decode(codes[g], num_tiles * kTileK, tiles[g]);
          codes[g] += num_tiles * kTileElements;
        }
        const uint16_t* b[2] = {tiles[0], tiles[num_groups - 1]};
        for (int row = rows.begin; row < rows.end; row += 2 * per_tile) {
          int num_rows = min_int(2 * per_tile, rows.end - row);
          int row_tiles = num_rows > per_tile ? 2 : 1;
          multiply_tiles(gemm, row, k, per_tile, row_tiles, num_groups, b, num_tiles,
                         {block, kBlockStride});
          for (int g = 0; g < num_groups; ++g)
            add_scaled(at[g].scales[s], block + g * kGroup, num_rows,
                       c + (row - rows.begin) * kBlockStride + g * kGroup);
        }
      }
      finish_coded(gemm, rows.begin, rows.size(), group, num_groups, c);
    }
    tile_release();
  }

  // e4m3 [step][column] -> tiles, times 2^-8: a step is two rows of pairs.
  static void decode(const uint8_t* codes, int num_k, uint16_t* tiles) {
    for (int k = 0; k < num_k; k += kStepK, codes += kStepK * kGroup) {
      __m512i pairs[2];
      Avx512Simd::decode_e4m3_pairs<true>(codes, pairs);
      _mm512_store_si512(tiles + k * kGroup, pairs[0]);
      _mm512_store_si512(tiles + (k + 2) * kGroup, pairs[1]);
    }
  }

  static void add_scaled(float scale, const float* from, int num_rows, float* c) {
    for (int r = 0; r < num_rows; ++r, from += kBlockStride, c += kBlockStride) {
      __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_load_ps(from));
      _mm512_store_ps(c, _mm512_add_ps(_mm512_load_ps(c), scaled));
    }
  }

  static void multiply_any(const Gemm& gemm, int row, int per_tile, int row_tiles,
                           int group, int num_groups, const Block& c) {
    const uint16_t* b[2] = {gemm.b.group(group), gemm.b.group(group + num_groups - 1)};
    multiply_tiles(gemm, row, 0, per_tile, row_tiles, num_groups, b, gemm.b.k_tiles(),
                   c);
  }

  // From `k` on, `k_tiles` tiles of one or two groups.
  static void multiply_tiles(const Gemm& gemm, int row, int k, int per_tile,
                             int row_tiles, int num_groups, const uint16_t* const b[2],
                             int k_tiles, const Block& c) {
    const uint16_t* a[2];
    a[0] = gemm.a + row * gemm.a_stride + k;
    a[1] = a[0] + per_tile * gemm.a_stride;
    ptrdiff_t stride = ptrdiff_t(gemm.a_stride) * 2;
    if (row_tiles == 2)
      num_groups == 2 ? multiply<2, 2>(a, stride, b, k_tiles, per_tile, c)
                      : multiply<2, 1>(a, stride, b, k_tiles, per_tile, c);
    else
      num_groups == 2 ? multiply<1, 2>(a, stride, b, k_tiles, per_tile, c)
                      : multiply<1, 1>(a, stride, b, k_tiles, per_tile, c);
  }

  // finish_block for two whole groups of bf16. The rounding is bf16_from_float's: sums
  // are never denormal, and of a NaN only the payload may differ.
  static void store_bf16(const Gemm& gemm, int row, int num_rows, int group,
                         const float* c) {
    auto* out = static_cast<uint16_t*>(gemm.c) + row * gemm.c_stride + group * kGroup;
    for (int r = 0; r < num_rows; ++r, out += gemm.c_stride, c += kBlockStride) {
      __m512 low = _mm512_load_ps(c), high = _mm512_load_ps(c + kGroup);
      _mm512_storeu_si512(out, __m512i(_mm512_cvtne2ps_pbh(high, low)));
    }
  }

  template <int kRowTiles, int kGroups>
  static void multiply(const uint16_t* const a[2], ptrdiff_t stride,
                       const uint16_t* const b[2], int k_tiles, int per_tile,
                       const Block& block) {
    tile_zero<0>();
    if (kGroups == 2) tile_zero<1>();
    if (kRowTiles == 2) tile_zero<2>();
    if (kRowTiles == 2 && kGroups == 2) tile_zero<3>();
    for (int t = 0; t < k_tiles; ++t) {
      tile_load<4>(a[0] + t * kTileK, stride);
      tile_load<6>(b[0] + t * kTileElements, kTileRowBytes);
      tile_multiply<0, 4, 6>();
      if (kGroups == 2) {
        tile_load<7>(b[1] + t * kTileElements, kTileRowBytes);
        tile_multiply<1, 4, 7>();
      }
      if (kRowTiles == 2) {
        tile_load<5>(a[1] + t * kTileK, stride);
        tile_multiply<2, 5, 6>();
        if (kGroups == 2) tile_multiply<3, 5, 7>();
      }
    }
    ptrdiff_t c_stride = ptrdiff_t(block.stride * sizeof(float));
    float *c = block.c, *below = c + per_tile * block.stride;
    tile_store<0>(c, c_stride);
    if (kGroups == 2) tile_store<1>(c + kGroup, c_stride);
    if (kRowTiles == 2) tile_store<2>(below, c_stride);
    if (kRowTiles == 2 && kGroups == 2) tile_store<3>(below + kGroup, c_stride);
  }
};

}  // namespace
}  // namespace host
}  // namespace duck
