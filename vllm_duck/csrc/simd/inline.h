// Inlining that the speed of the kernels depends on.
#pragma once

// For what kernels call for each segment: a function of a header that is compiled
// without AVX would make the CPU switch between SSE and AVX at each call. And for what
// prefetches: g++ takes a function that does nothing else for one without effect, and
// drops its calls before it thinks of inlining them.
#define DUCK_INLINE inline __attribute__((always_inline))

namespace duck {

// Keeps memory accesses on their side of it. g++ would gather the prefetches of an
// unrolled loop at its start, and a burst of 32 of them waits for the memory, and the
// arithmetic behind it too: spread out, weights stream 15 % faster.
DUCK_INLINE void keep_order() { asm volatile("" ::: "memory"); }

}  // namespace duck
