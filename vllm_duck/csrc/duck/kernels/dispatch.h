// Which kernels this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "duck/kernels/kernel_table.h"

namespace duck {

// Best first.
std::vector<const KernelTable*> supported_kernels();

// By name, or the best for an empty name; null if this CPU or build lacks it.
const KernelTable* find_kernels(const std::string& name);

}  // namespace duck
