// Kernels for AVX-512 (F, BW).
#include <type_traits>

#include "kernel.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstdint>
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512vl,fma")

#include "few_rows.h"
#include "simd_avx512.h"

namespace duck {

const KernelTable* avx512_kernels() {
  using Kernels = VectorKernels<Avx512Simd>;
  static const KernelTable table = {
      "avx512",          1 << 30,       Kernels::scratch_bytes,
      Kernels::gate_up, Kernels::down, nullptr};
  bool has_them = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("fma");
  return has_them ? &table : nullptr;
}

}  // namespace duck
#else
const duck::KernelTable* duck::avx512_kernels() { return nullptr; }
#endif
