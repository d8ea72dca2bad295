// The host's compute for AVX2 with FMA.
#include "host/kernels/kernels.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstring>
#pragma GCC target("avx2,fma")

#include "host/gemm/gemm_vector.h"
#include "host/kernels/all_kernels.h"
#include "simd/avx2.h"

namespace {
using namespace duck::host;
using namespace duck;
struct Avx2Kernels : VectorGemm<Avx2Simd>, PlainDecode {};
}  // namespace

const duck::host::HostKernels* duck::host::avx2_kernels() {
  static const HostKernels kernels = host_kernels<Avx2Kernels>("avx2");
  bool has_them = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_them ? &kernels : nullptr;
}
#else
const duck::host::HostKernels* duck::host::avx2_kernels() { return nullptr; }
#endif
