// The host's compute for any CPU.
#include "simd/portable.h"

#include "host/gemm/gemm_vector.h"
#include "host/kernels/all_kernels.h"

namespace {
using namespace duck::host;
using namespace duck;
struct PortableKernels : VectorGemm<PortableSimd>, PlainDecode {};
}  // namespace

const duck::host::HostKernels* duck::host::portable_kernels() {
  static const HostKernels kernels = host_kernels<PortableKernels>("portable");
  return &kernels;
}
