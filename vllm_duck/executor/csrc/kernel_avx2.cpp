// Kernels for AVX2 with FMA.
#include <type_traits>

#include "kernel.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstdint>
#include <cstring>
#pragma GCC target("avx2,fma")

#include "few_rows.h"
#include "simd_avx2.h"

namespace duck {

const KernelTable* avx2_kernels() {
  using Kernels = VectorKernels<Avx2Simd>;
  static const KernelTable table = {
      "avx2",           1 << 30,       Kernels::scratch_bytes,
      Kernels::gate_up, Kernels::down, nullptr};
  bool has_them = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_them ? &table : nullptr;
}

}  // namespace duck
#else
const duck::KernelTable* duck::avx2_kernels() { return nullptr; }
#endif
