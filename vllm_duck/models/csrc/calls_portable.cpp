// The host's compute for any CPU.
#include "attend.h"
#include "gemm_vector.h"
#include "simd_portable.h"

const duck::host::Calls* duck::host::portable_calls() {
  static const Calls calls = calls_of<VectorGemm<PortableSimd>>("portable");
  return &calls;
}
