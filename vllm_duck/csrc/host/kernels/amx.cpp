// The host's compute for AMX: AVX-512 (with BF16) and tiles for the GEMMs.
#include "host/kernels/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

#include "host/gemm/gemm_amx.h"
#include "host/kernels/all_kernels.h"
#include "host/kernels/decode_avx512.h"
#include "simd/amx_probe.h"

namespace {
using namespace duck::host;
using namespace duck;
struct AmxKernels : AmxGemm, Avx512Decode {};
}  // namespace

const duck::host::HostKernels* duck::host::amx_kernels() {
  static const HostKernels kernels = host_kernels<AmxKernels>("amx");
  bool usable =
      avx512_kernels() && __builtin_cpu_supports("avx512bf16") && amx_is_usable();
  return usable ? &kernels : nullptr;
}
#else
const duck::host::HostKernels* duck::host::amx_kernels() { return nullptr; }
#endif
