// The host's compute for AMX: AVX-512 (with BF16) and tiles for the GEMMs.
#include "host/kernels/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

#include "host/gemm/gemm_amx.h"
#include "host/kernels/attend.h"
#include "host/kernels/decode_avx512.h"
#include "simd/amx_probe.h"

namespace {
using namespace duck::host;
using namespace duck;
struct AmxKernels : AmxGemm, Avx512Decode {};
}  // namespace

const duck::host::Calls* duck::host::amx_calls() {
  static const Calls calls = calls_of<AmxKernels>("amx");
  bool usable =
      avx512_calls() && __builtin_cpu_supports("avx512bf16") && amx_is_usable();
  return usable ? &calls : nullptr;
}
#else
const duck::host::Calls* duck::host::amx_calls() { return nullptr; }
#endif
