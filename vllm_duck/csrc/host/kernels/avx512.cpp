// The host's compute for AVX-512 (F, BW, DQ, VL).
#include "host/kernels/kernels.h"

#if defined(__x86_64__)
// Everything below is compiled for these instructions, and called only where the CPU
// has them. Standard headers stay above: what they inline must run anywhere.
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")

#include "host/gemm/gemm_vector.h"
#include "host/kernels/all_kernels.h"
#include "host/kernels/decode_avx512.h"
#include "simd/avx512.h"

namespace {
using namespace duck::host;
using namespace duck;
struct Avx512Kernels : VectorGemm<Avx512Simd>, Avx512Decode {};
}  // namespace

const duck::host::HostKernels* duck::host::avx512_kernels() {
  static const HostKernels kernels = host_kernels<Avx512Kernels>("avx512");
  bool has_them = __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  return has_them ? &kernels : nullptr;
}
#else
const duck::host::HostKernels* duck::host::avx512_kernels() { return nullptr; }
#endif
