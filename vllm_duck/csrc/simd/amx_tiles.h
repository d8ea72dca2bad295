// The AMX tile unit. Register use is fixed:
//   0..3  C, fp32 [rows][16]: (row tile 0, 1) x (matrix 0, 1)
//   4, 5  A, bf16 [rows][32]: activations of row tile 0, 1
//   6, 7  B, bf16 [16 pairs][16][2]: weights of matrix 0, 1
// The compilers' own intrinsics do not say that a tile load reads memory, and stores
// into a tile's source get lost; these say so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;
constexpr int kTileRowBytes = 64;

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void tile_load(const void* at, ptrdiff_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(kTile)
               : "memory");
}

template <int kTile>
inline void tile_store(void* at, ptrdiff_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row_bytes), "i"(kTile)
               : "memory");
}

template <int kC, int kA, int kB>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kB), "i"(kA), "i"(kC));
}

// A and C tiles get `num_rows` rows. Zeroes all tiles.
inline void tile_configure(int num_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = uint8_t(tile < 6 ? num_rows : kTileRows);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void tile_release() { asm volatile("tilerelease"); }

}  // namespace
}  // namespace duck
