// Memory for weights and scratch in huge pages, where the system has them: a walk
// through the page tables for each 4 KiB would cost as much as the reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace duck {

// Zeroed, 64-byte aligned. Small pieces share a mapping, which goes with its last one.
std::shared_ptr<uint8_t> take_huge(size_t num_bytes);

}  // namespace duck
