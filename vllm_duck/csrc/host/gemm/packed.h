// A bf16 weight matrix as the kernels read it.
//
//   group  16 output columns; the last one is padded with zeros.
//   tile   16 columns x 32 k, [16 pairs of k][16 columns][2]: one AMX B tile, 1 KiB.
//          The last tile of a group is padded with zeros.
// Tiles of one group follow each other in rising k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/huge_pages.h"
#include "simd/tile.h"

namespace duck {
namespace host {

struct PackedView {
  const uint16_t* tiles;
  int k;
  int n;

  int k_tiles() const { return ceil_div(k, kTileK); }
  int groups() const { return ceil_div(n, kGroup); }
  const uint16_t* group(int g) const {
    return tiles + size_t(g) * k_tiles() * kTileElements;
  }
};

// Where a matrix lies before it is packed: element (n, k) is data[n * n_stride + k *
// k_stride].
struct Source {
  const uint16_t* data;
  size_t n_stride;
  size_t k_stride;
};

class PackedMatrix {
 public:
  PackedMatrix(int n, int k);

  // Fills the 16 columns of `group` with source columns [first, first + count).
  void pack_group(int group, const Source& source, int first, int count);
  // Fills all groups.
  void pack(const Source& source);

  PackedView view() const {
    return {reinterpret_cast<const uint16_t*>(memory_.get()), k_, n_};
  }

 private:
  int n_, k_;
  std::shared_ptr<uint8_t> memory_;
};

// gate and up [columns][k] side by side: groups 2i and 2i + 1 are 16 columns of each.
PackedMatrix pack_gate_up(const Source& gate, const Source& up, int columns, int k);

}  // namespace host
}  // namespace duck
