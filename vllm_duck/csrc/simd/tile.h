// The sizes in which all kernels take weights.
#pragma once

namespace duck {

// Columns, or outputs, of a weight matrix that are multiplied together.
constexpr int kGroup = 16;
// Their k that are, too: 16 columns x 32 k are a tile.
constexpr int kTileK = 32;
constexpr int kTileElements = kGroup * kTileK;
// Neighbours in a row or a column that share one scale.
constexpr int kScaleBlock = 128;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int size, int unit) { return ceil_div(size, unit) * unit; }

}  // namespace duck
