#include "simd/amx_probe.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd/amx_tiles.h"
#include "simd/bf16.h"
#include "simd/tile.h"

namespace duck {
namespace {

bool cpu_has_amx_bf16() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  return (d & kBf16) && (d & kTile);
}

// The kernel gives a process the big tile state only when asked.
bool os_grants_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The unit's order of additions is not architecturally nailed down well enough to bet
// a model's bits on it: try it once, and leave a CPU that differs to AVX-512.
bool adds_in_our_order() {
  alignas(64) uint16_t a[32], b[16][kGroup][2];
  alignas(64) float c[kGroup];
  uint32_t state = 1;
  auto next = [&] {
    state = state * 1664525u + 1013904223u;
    // 2^-8 .. 2^8 with random mantissas and signs.
    return uint16_t((state >> 31 << 15) | ((119 + (state >> 20) % 17) << 7) |
                    (state >> 8 & 0x7f));
  };
  for (int trial = 0; trial < 16; ++trial) {
    for (auto& value : a) value = next();
    for (auto& row : b)
      for (auto& pair : row)
        for (auto& value : pair) value = next();
    tile_configure(1);
    tile_load<4>(a, kTileRowBytes);
    tile_load<6>(b, kTileRowBytes);
    tile_multiply<0, 4, 6>();
    tile_multiply<0, 4, 6>();
    tile_store<0>(c, kTileRowBytes);
    tile_release();
    for (int i = 0; i < kGroup; ++i) {
      float even = 0, odd = 0;
      for (int p = 0; p < 16; ++p) {
        even += bf16_to_float(a[2 * p]) * bf16_to_float(b[p][i][0]);
        odd += bf16_to_float(a[2 * p + 1]) * bf16_to_float(b[p][i][1]);
      }
      float once = even + odd;
      if (c[i] != once + once) return false;
    }
  }
  return true;
}

}  // namespace

bool amx_is_usable() {
  static const bool usable =
      cpu_has_amx_bf16() && os_grants_tiles() && adds_in_our_order();
  return usable;
}

}  // namespace duck
#else
bool duck::amx_is_usable() { return false; }
#endif
