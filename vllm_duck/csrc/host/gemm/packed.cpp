#include "host/gemm/packed.h"

namespace duck {
namespace host {

PackedMatrix::PackedMatrix(int n, int k)
    : n_(n),
      k_(k),
      memory_(take_huge(size_t(round_up(n, kGroup)) * round_up(k, kTileK) *
                        sizeof(uint16_t))) {}

void PackedMatrix::pack_group(int group, const Source& source, int first, int count) {
  auto* tiles = const_cast<uint16_t*>(view().group(group));
  for (int column = 0; column < count; ++column) {
    const uint16_t* from = source.data + (first + column) * source.n_stride;
    for (int k = 0; k < k_; ++k)
      tiles[(k / 2 * kGroup + column) * 2 + k % 2] = from[k * source.k_stride];
  }
}

void PackedMatrix::pack(const Source& source) {
  for (int group = 0; group < view().groups(); ++group) {
    int first = group * kGroup;
    int count = n_ - first < kGroup ? n_ - first : kGroup;
    pack_group(group, source, first, count);
  }
}

PackedMatrix pack_gate_up(const Source& gate, const Source& up, int columns, int k) {
  PackedMatrix packed(2 * round_up(columns, kGroup), k);
  for (int first = 0; first < columns; first += kGroup) {
    int count = columns - first < kGroup ? columns - first : kGroup;
    packed.pack_group(first / kGroup * 2, gate, first, count);
    packed.pack_group(first / kGroup * 2 + 1, up, first, count);
  }
  return packed;
}

}  // namespace host
}  // namespace duck
