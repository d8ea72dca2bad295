// Kernels for any CPU.
#include <type_traits>

#include "few_rows.h"
#include "simd_portable.h"

namespace duck {

const KernelTable* portable_kernels() {
  using Kernels = VectorKernels<PortableSimd>;
  static const KernelTable table = {
      "portable",       1 << 30,       Kernels::scratch_bytes,
      Kernels::gate_up, Kernels::down, nullptr};
  return &table;
}

}  // namespace duck
