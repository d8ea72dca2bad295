// Kernels for AVX2 with FMA.
#include <type_traits>

#include "duck/kernels/kernel_table.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstdint>
#include <cstring>
#pragma GCC target("avx2,fma")

#include "duck/kernels/vector_kernels.h"
#include "simd/avx2.h"

namespace duck {

const KernelTable* avx2_kernels() {
  static const KernelTable table = vector_kernel_table<Avx2Simd>("avx2");
  bool has_them = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_them ? &table : nullptr;
}

}  // namespace duck
#else
const duck::KernelTable* duck::avx2_kernels() { return nullptr; }
#endif
