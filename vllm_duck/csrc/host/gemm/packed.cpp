#include "host/gemm/packed.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

namespace duck {
namespace host {

Part rows_part(const void* weight, const float* scales, int n, int k) {
  return {weight, scales, n, size_t(k), 1, 0, size_t(ceil_div(k, kScaleBlock)), 1};
}

// Columns [from, from + count) of a part; `at`: where in its group the first one goes.
struct PackedMatrix::Slice {
  const Part* part;
  int from, count;
  int group, at;
  int first;  // the group's first column in the matrix
};

// What a coded view points into.
struct PackedMatrix::Coded {
  std::vector<CodedGroup> groups;
  std::vector<float> scales;
  std::vector<uint8_t> marks;
  CodedView view;
};

namespace {

// body(item) for each item, on all threads.
template <class Body>
void for_all(Pool* pool, size_t items, const Body& body) {
  std::atomic<size_t> next{0};
  pool->run(pool->num_threads(), [&](int) {
    for (size_t item; (item = next.fetch_add(1)) < items;) body(item);
  });
}

// k that are taken from the source together: whole cache lines of each column, since
// columns that are a power of two apart push each other out of the cache.
constexpr int kBlockK = kScaleBlock;

// 16 columns of a part, `num_k` <= kBlockK from `k` on; zeros past both ends.
template <class T>
struct Block {
  T values[kGroup][kBlockK];

  Block(const Part& part, int from, int count, int k, int num_k) {
    if (count < kGroup || num_k < kBlockK) std::memset(values, 0, sizeof values);
    auto* source =
        static_cast<const T*>(part.weight) + from * part.n_stride + k * part.k_stride;
    if (part.k_stride == 1) {
      for (int column = 0; column < count; ++column)
        std::memcpy(values[column], source + column * part.n_stride, num_k * sizeof(T));
    } else {
      for (int i = 0; i < num_k; ++i)
        for (int column = 0; column < count; ++column)
          values[column][i] = source[i * part.k_stride + column * part.n_stride];
    }
  }

  // Four bytes of each column, from `k` on.
  void dwords(int k, uint32_t row[kGroup]) const {
    for (int column = 0; column < kGroup; ++column)
      std::memcpy(row + column, values[column] + k, sizeof *row);
  }
};

void fill_tiles(const Part& part, int from, int count, int at, int k, uint16_t* tiles) {
  for (int begin = 0; begin < k; begin += kBlockK) {
    int num_k = k - begin < kBlockK ? k - begin : kBlockK;
    Block<uint16_t> block(part, from, count, begin, num_k);
    for (int i = 0; i < num_k; i += 2) {
      uint32_t row[kGroup];
      block.dwords(i, row);
      std::memcpy(tiles + ((begin + i) / 2 * kGroup + at) * 2, row,
                  sizeof *row * count);
    }
  }
}

// One segment of a group; `marks` gets its tiles. Returns whether a code is NaN.
bool fill_segment(const Part& part, int from, int count, int begin, int end,
                  uint8_t* to, uint8_t* marks) {
  Block<uint8_t> block(part, from, count, begin, end - begin);
  uint32_t any_nan = 0;
  *marks = 0;
  int num_tiles = ceil_div(end - begin, kTileK);
  for (int tile = 0; tile < num_tiles; ++tile) {
    uint32_t all_normal = ~0u;
    for (int k = tile * kTileK; k < (tile + 1) * kTileK; k += kStepK) {
      uint32_t row[kGroup];
      block.dwords(k, row);
      for (uint32_t& codes : row) {
        any_nan |= (codes & 0x7f7f7f7fu) + 0x01010101u;
        all_normal &= (codes & 0x78787878u) + 0x78787878u;
        // k0 k2 k1 k3
        codes = (codes & 0xff0000ffu) | (codes & 0xff00u) << 8 | (codes >> 8 & 0xff00u);
      }
      std::memcpy(to, row, sizeof row);
      to += sizeof row;
    }
    if ((all_normal & 0x80808080u) != 0x80808080u) *marks |= uint8_t(1u << tile);
  }
  return (any_nan & 0x80808080u) != 0;
}

size_t padded_k(const KAxis& axis) { return size_t(axis.padded_length()); }

}  // namespace

PackedMatrix::PackedMatrix(Pool* pool, const std::vector<Part>& parts, int k,
                           int k_offset) {
  bool is_coded = false;
  for (auto& part : parts) is_coded |= part.scales != nullptr;
  std::vector<Slice> slices;
  int n = 0, group = -1, room = 0;
  for (auto& part : parts) {
    if (is_coded) room = 0;
    for (int from = 0; from < part.n;) {
      if (room == 0) ++group, room = kGroup;
      int at = kGroup - room, count = room;
      if (part.scales) {
        int to_block = kScaleBlock - (part.n_offset + from) % kScaleBlock;
        if (to_block < count) count = to_block;
      }
      if (part.n - from < count) count = part.n - from;
      slices.push_back({&part, from, count, group, at, n - at});
      from += count, n += count;
      room = is_coded && part.scales ? 0 : room - count;
    }
  }
  // A segment must not end within a tile: the rows would have to be padded there too.
  if (is_coded && k_offset % kTileK)
    throw std::invalid_argument(
        "heads of e4m3 must begin at multiples of 32 rows (qk_nope_head_dim, "
        "v_head_dim)");
  if (is_coded)
    pack_coded(pool, slices, n, k, k_offset);
  else
    pack_tiles(pool, slices, n, k);
}

void PackedMatrix::pack_tiles(Pool* pool, const std::vector<Slice>& slices, int n,
                              int k) {
  int num_groups = slices.empty() ? 0 : slices.back().group + 1;
  size_t group_elements = size_t(round_up(k, kTileK)) * kGroup;
  memory_ = take_huge(num_groups * group_elements * sizeof(uint16_t));
  auto* tiles = reinterpret_cast<uint16_t*>(memory_.get());
  for_all(pool, slices.size(), [&](size_t i) {
    auto& s = slices[i];
    fill_tiles(*s.part, s.from, s.count, s.at, k, tiles + s.group * group_elements);
  });
  view_ = {tiles, k, n};
}

void PackedMatrix::pack_coded(Pool* pool, const std::vector<Slice>& slices, int n,
                              int k, int k_offset) {
  KAxis axis(k, k_offset, Format::kE4m3);
  int num_segments = axis.num_segments();
  size_t coded_bytes = padded_k(axis) * kGroup;
  size_t tile_bytes = size_t(round_up(k, kTileK)) * kGroup * sizeof(uint16_t);
  coded_ = std::make_shared<Coded>();
  auto& held = *coded_;
  held.groups.resize(slices.empty() ? 0 : slices.back().group + 1);
  held.scales.resize(held.groups.size() * num_segments);
  held.marks.resize(held.groups.size() * num_segments);
  std::vector<size_t> offsets(held.groups.size());
  size_t num_bytes = 0;
  for (auto& s : slices) {
    if (s.at > 0) continue;
    offsets[s.group] = num_bytes;
    num_bytes += s.part->scales ? coded_bytes : tile_bytes;
  }
  memory_ = take_huge(num_bytes);
  std::atomic<bool> any_nan{false};
  for_all(pool, slices.size(), [&](size_t i) {
    auto& s = slices[i];
    const Part& part = *s.part;
    uint8_t* to = memory_.get() + offsets[s.group];
    CodedGroup& group = held.groups[s.group];
    if (!part.scales) {
      fill_tiles(part, s.from, s.count, s.at, k, reinterpret_cast<uint16_t*>(to));
      // Slices of one group are of one part, and this is the only one.
      group = {to, nullptr, nullptr, s.first, s.count};
      return;
    }
    float* scales = &held.scales[size_t(s.group) * num_segments];
    uint8_t* marks = &held.marks[size_t(s.group) * num_segments];
    const float* source =
        part.scales + (part.n_offset + s.from) / kScaleBlock * part.scale_n_stride;
    group = {to, scales, marks, s.first, s.count};
    for (int segment = 0; segment < num_segments; ++segment) {
      int begin = axis.begin(segment), end = axis.end(segment);
      scales[segment] = source[segment * part.scale_k_stride] * kScaleFix;
      if (fill_segment(part, s.from, s.count, begin, end, to, marks + segment))
        any_nan = true;
      to += size_t(round_up(end - begin, kTileK)) * kGroup;
    }
  });
  if (any_nan)
    throw std::invalid_argument("no weight may be NaN, got one: the file is damaged");
  held.view = {held.groups.data(), int(held.groups.size()), axis.offset};
  view_ = {nullptr, k, n, &held.view};
}

PackedMatrix pack_gate_up(Pool* pool, const Part& gate, const Part& up, int k) {
  if ((gate.scales == nullptr) != (up.scales == nullptr))
    throw std::invalid_argument("gate and up must both be e4m3, or neither");
  std::vector<PackedMatrix::Slice> slices;
  for (int from = 0; from < gate.n; from += kGroup) {
    int count = gate.n - from < kGroup ? gate.n - from : kGroup;
    int group = from / kGroup * 2;
    slices.push_back({&gate, from, count, group, 0, from});
    slices.push_back({&up, from, count, group + 1, 0, from});
  }
  PackedMatrix packed;
  int n = 2 * round_up(gate.n, kGroup);
  if (gate.scales)
    packed.pack_coded(pool, slices, n, k, 0);
  else
    packed.pack_tiles(pool, slices, n, k);
  return packed;
}

}  // namespace host
}  // namespace duck
