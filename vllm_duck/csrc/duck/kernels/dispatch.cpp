#include "duck/kernels/dispatch.h"

namespace duck {

std::vector<const KernelTable*> supported_kernels() {
  std::vector<const KernelTable*> found;
  for (auto* table :
       {amx_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()})
    if (table) found.push_back(table);
  return found;
}

const KernelTable* find_kernels(const std::string& name) {
  for (auto* table : supported_kernels())
    if (name.empty() || name == table->name) return table;
  return nullptr;
}

}  // namespace duck
