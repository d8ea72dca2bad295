// Tile products of one segment, and their way into the totals.
#pragma once

#include "duck/kernels/kernel_table.h"
#include "simd/amx_tiles.h"
#include "simd/avx512.h"

namespace duck {
namespace {

// Products of up to two row tiles with one or two matrices over one segment.
struct Products {
  alignas(64) float c[2][2][kTileRows][kGroup];  // [row tile][matrix][row][column]
};

struct Activations {
  const uint8_t* data;  // of the first row tile, at the segment
  ptrdiff_t row_bytes;
  ptrdiff_t tile_bytes;      // from one 32-wide tile to the next
  ptrdiff_t row_tile_bytes;  // from one row tile to the next
};

template <int kRowTiles, int kMatrices>
inline void multiply(const Activations& a, const uint8_t* const b[2], int num_tiles,
                     Products* out) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int t = 0; t < num_tiles; ++t) {
    const uint8_t* at = a.data + t * a.tile_bytes;
    tile_load<4>(at, a.row_bytes);
    tile_load<6>(b[0] + t * kTileBytes, kTileRowBytes);
    tile_multiply<0, 4, 6>();
    if (kMatrices == 2) {
      tile_load<7>(b[1] + t * kTileBytes, kTileRowBytes);
      tile_multiply<1, 4, 7>();
    }
    if (kRowTiles == 2) {
      tile_load<5>(at + a.row_tile_bytes, a.row_bytes);
      tile_multiply<2, 5, 6>();
      if (kMatrices == 2) tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(out->c[0][0], kTileRowBytes);
  if (kMatrices == 2) tile_store<1>(out->c[0][1], kTileRowBytes);
  if (kRowTiles == 2) tile_store<2>(out->c[1][0], kTileRowBytes);
  if (kRowTiles == 2 && kMatrices == 2) tile_store<3>(out->c[1][1], kTileRowBytes);
}

inline void multiply_any(int row_tiles, int matrices, const Activations& a,
                         const uint8_t* const b[2], int num_tiles, Products* out) {
  if (row_tiles == 2)
    matrices == 2 ? multiply<2, 2>(a, b, num_tiles, out)
                  : multiply<2, 1>(a, b, num_tiles, out);
  else
    matrices == 2 ? multiply<1, 2>(a, b, num_tiles, out)
                  : multiply<1, 1>(a, b, num_tiles, out);
}

inline void add_scaled_group(__m512 scale, const float* product, float* total) {
  __m512 scaled = _mm512_mul_ps(scale, _mm512_load_ps(product));
  _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total), scaled));
}

// total[row][matrix] += scale * product, for the rows of `row_tiles` row tiles.
inline void add_scaled(const Products& products, int row_tiles, int rows_per_tile,
                       int matrices, const __m512 scale[2], float* total) {
  for (int rt = 0; rt < row_tiles; ++rt)
    for (int r = 0; r < rows_per_tile; ++r, total += 2 * kGroup)
      for (int m = 0; m < matrices; ++m)
        add_scaled_group(scale[m], products.c[rt][m][r], total + m * kGroup);
}

}  // namespace
}  // namespace duck
