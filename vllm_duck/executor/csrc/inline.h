// Inlining that the speed of the kernels depends on.
#pragma once

// For what kernels call for each segment: a function of a header that is compiled
// without AVX would make the CPU switch between SSE and AVX at each call. And for what
// prefetches: g++ takes a function that does nothing else for one without effect, and
// drops its calls before it thinks of inlining them.
#define DUCK_INLINE inline __attribute__((always_inline))
