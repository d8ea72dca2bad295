// The indexer's choice: the k best of n scores.
//
// Of equal scores the LATER position wins. The choice then depends on the scores alone,
// so it is the same however the prompt was chunked.
// Include after the target pragma of the source that uses it.
#pragma once

#include "simd/silu.h"

namespace duck {
namespace host {
namespace {

// Orders as the floats do; adding 0 makes -0 equal to 0.
inline uint32_t ordered_bits(float score) {
  uint32_t bits = bits_from_float(score + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

inline int count_at_least(const uint32_t* keys, int n, uint32_t least) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += keys[i] >= least;
  return count;
}

// Writes the k best positions of 0 .. n - 1 in rising order, k < n. `keys` has room
// for n.
inline void select_best(const float* scores, int n, int k, uint32_t* keys,
                        int32_t* positions) {
  for (int i = 0; i < n; ++i) keys[i] = ordered_bits(scores[i]);
  // The highest value that at least k keys reach, bit by bit from the top.
  uint32_t least = 0;
  int reached = n;
  for (uint32_t bit = 0x80000000u; bit != 0 && reached != k; bit >>= 1) {
    int count = count_at_least(keys, n, least | bit);
    if (count < k) continue;
    least |= bit;
    reached = count;
  }
  // The first few of the keys that equal it are too many.
  int excess = reached - k, count = 0;
  for (int i = 0; i < n; ++i) {
    if (excess > 0 && keys[i] == least) {
      --excess;
      continue;
    }
    if (keys[i] >= least) positions[count++] = i;
  }
}

}  // namespace
}  // namespace host
}  // namespace duck
