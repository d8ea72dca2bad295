// The host's compute for any CPU.
#include "simd/portable.h"

#include "host/gemm/gemm_vector.h"
#include "host/kernels/attend.h"

namespace {
using namespace duck::host;
using namespace duck;
struct PortableKernels : VectorGemm<PortableSimd>, PlainDecode {};
}  // namespace

const duck::host::Calls* duck::host::portable_calls() {
  static const Calls calls = calls_of<PortableKernels>("portable");
  return &calls;
}
