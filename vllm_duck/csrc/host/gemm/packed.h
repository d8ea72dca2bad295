// A weight matrix as the kernels read it.
//
//   group  16 output columns.
//   tile   16 columns x 32 k.
//
// Of bf16 alone, groups lie one behind the other, the last one padded with zeros; a
// tile is [16 pairs of k][16 columns][2]: one AMX B tile, 1 KiB. The last tile of a
// group is padded with zeros. Tiles of one group follow each other in rising k.
//
// Where a part of it is e4m3 ("coded"), a group ends with a part and with a scale
// block, and has a format of its own: tiles of bf16 as above; or segments of e4m3, each
// as in simd/formats.h and padded with zeros to whole tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/huge_pages.h"
#include "base/pool.h"
#include "simd/formats.h"

namespace duck {
namespace host {

struct CodedGroup {
  const uint8_t* weights;
  const float* scales;   // of each segment, times kScaleFix; null: bf16
  const uint8_t* marks;  // of each segment: which tiles hold zeros or subnormals
  int first, count;      // its columns
};

struct CodedView {
  const CodedGroup* groups;
  int num_groups;
  int k_offset;  // of k = 0 within its scale block, a multiple of kTileK
};

struct PackedView {
  const uint16_t* tiles;
  int k;
  int n;
  const CodedView* coded = nullptr;  // in place of tiles

  int k_tiles() const { return ceil_div(k, kTileK); }
  int groups() const { return coded ? coded->num_groups : ceil_div(n, kGroup); }
  const uint16_t* group(int g) const {
    return tiles + size_t(g) * k_tiles() * kTileElements;
  }
  KAxis coded_axis() const { return {k, coded->k_offset, Format::kE4m3}; }
};

// Some columns of a matrix before they are packed: element (n, k) is weight[n *
// n_stride
// + k * k_stride], bf16, or an e4m3 code if there are scales, one for 128 x 128.
struct Part {
  const void* weight;
  const float* scales;  // null: bf16
  int n;
  size_t n_stride, k_stride;
  // Scale of (n, k): [(n_offset + n) / 128 * scale_n_stride + k's block *
  // scale_k_stride], k's block counted from the matrix's k_offset.
  int n_offset = 0;
  size_t scale_n_stride = 0, scale_k_stride = 0;
};

// [n][k] as a checkpoint has it.
Part rows_part(const void* weight, const float* scales, int n, int k);

class PackedMatrix {
 public:
  // Parts one below the other. Throws std::invalid_argument if a code is NaN.
  PackedMatrix(Pool* pool, const std::vector<Part>& parts, int k, int k_offset = 0);

  PackedView view() const { return view_; }

 private:
  friend PackedMatrix pack_gate_up(Pool*, const Part&, const Part&, int);
  struct Slice;  // columns of a part that become a group
  struct Coded;

  PackedMatrix() = default;
  void pack_tiles(Pool* pool, const std::vector<Slice>& slices, int n, int k);
  void pack_coded(Pool* pool, const std::vector<Slice>& slices, int n, int k,
                  int k_offset);

  std::shared_ptr<uint8_t> memory_;
  std::shared_ptr<Coded> coded_;
  PackedView view_ = {};
};

// gate and up side by side: groups 2i and 2i + 1 are 16 columns of each. Both are bf16,
// or both are coded.
PackedMatrix pack_gate_up(Pool* pool, const Part& gate, const Part& up, int k);

}  // namespace host
}  // namespace duck
