// Kernels for AVX-512 (F, BW).
#include <type_traits>

#include "duck/kernels/kernel_table.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstdint>
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512vl,fma")

#include "duck/kernels/vector_kernels.h"
#include "simd/avx512.h"

namespace duck {

const KernelTable* avx512_kernels() {
  static const KernelTable table = vector_kernel_table<Avx512Simd>("avx512");
  bool has_them = __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  return has_them ? &table : nullptr;
}

}  // namespace duck
#else
const duck::KernelTable* duck::avx512_kernels() { return nullptr; }
#endif
