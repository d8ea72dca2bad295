// Kernels for any CPU.
#include "simd/portable.h"

#include <type_traits>

#include "duck/kernels/vector_kernels.h"

namespace duck {

const KernelTable* portable_kernels() {
  static const KernelTable table = vector_kernel_table<PortableSimd>("portable");
  return &table;
}

}  // namespace duck
