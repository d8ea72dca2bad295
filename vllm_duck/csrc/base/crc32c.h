// CRC-32C (Castagnoli), the checksum of a message; with AVX-512 and VPCLMULQDQ faster
// than memory, with SSE4.2 three bytes a cycle and more.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {

// The checksum of what `crc` covers followed by `data`; 0 covers nothing.
uint32_t crc32c(const void* data, size_t num_bytes, uint32_t crc = 0);

}  // namespace duck
