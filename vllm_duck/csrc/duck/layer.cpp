#include "duck/layer.h"

#include <cmath>
#include <cstring>

#include "base/huge_pages.h"

namespace duck {
namespace {

// Four dwords of one row of the source, or of four neighbouring columns of a tile.
typedef uint32_t Dwords __attribute__((vector_size(16)));

Dwords load_dwords(const uint8_t* at) {
  Dwords values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

void store_dwords(uint8_t* at, Dwords values) {
  std::memcpy(at, &values, sizeof values);
}

template <int A, int B, int C, int D>
Dwords pick(Dwords low, Dwords high) {
#ifdef __clang__
  return __builtin_shufflevector(low, high, A, B, C, D);
#else
  return __builtin_shuffle(low, high, Dwords{A, B, C, D});
#endif
}

void transpose(Dwords rows[4]) {
  Dwords a = pick<0, 4, 1, 5>(rows[0], rows[1]), b = pick<0, 4, 1, 5>(rows[2], rows[3]);
  Dwords c = pick<2, 6, 3, 7>(rows[0], rows[1]), d = pick<2, 6, 3, 7>(rows[2], rows[3]);
  rows[0] = pick<0, 1, 4, 5>(a, b);
  rows[1] = pick<2, 3, 6, 7>(a, b);
  rows[2] = pick<0, 1, 4, 5>(c, d);
  rows[3] = pick<2, 3, 6, 7>(c, d);
}

uint32_t any_of(Dwords values) { return values[0] | values[1] | values[2] | values[3]; }

// What a tile's codes were, gathered as sticky bits.
struct Seen {
  Dwords not_finite = {};
  Dwords zero_exponent = {};
};

// The sums cannot carry from one byte to the next: 0x7f + 1 and 0x78 + 0x78 fit.
void inspect_e4m3(Dwords codes, Seen* seen) {
  seen->not_finite |= ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  seen->zero_exponent |= ~((codes & 0x78787878u) + 0x78787878u) & 0x80808080u;
}

void inspect_bf16(Dwords codes, Seen* seen) {
  seen->not_finite |= ((codes & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}

Dwords swap_middle_bytes(Dwords codes) {
  return (codes & 0xff0000ffu) | ((codes & 0x0000ff00u) << 8) |
         ((codes & 0x00ff0000u) >> 8);
}

// Squares of 4 columns x 4 dwords (a row of the source has a multiple of 16 codes):
// whole vectors in and out take a sixth of the time of single dwords.
template <Format format>
void pack_tile(const uint8_t* source, ptrdiff_t row_bytes, int num_k, uint8_t* tile,
               Seen* seen) {
  int num_dwords = int(packed_bytes(format, num_k)) / 4;
  for (int dword = 0; dword < num_dwords; dword += 4) {
    for (int column = 0; column < kGroup; column += 4) {
      Dwords square[4];
      for (int i = 0; i < 4; ++i) {
        Dwords codes = load_dwords(source + (column + i) * row_bytes + dword * 4);
        if constexpr (format == Format::kE4m3) {
          inspect_e4m3(codes, seen);
          codes = swap_middle_bytes(codes);
        } else if constexpr (format == Format::kInt8) {
          codes = swap_middle_bytes(codes ^ 0x80808080u);
        } else {
          inspect_bf16(codes, seen);
        }
        square[i] = codes;
      }
      transpose(square);
      for (int i = 0; i < 4; ++i)
        store_dwords(tile + ((dword + i) * kGroup + column) * 4, square[i]);
    }
  }
}

// Two bytes of the source are one step of one column.
void pack_int4_tile(const uint8_t* source, ptrdiff_t row_bytes, int num_k,
                    uint8_t* tile) {
  for (int step = 0; step < num_k / kStepK; ++step) {
    uint8_t* unit = tile + step / 2 * kGroup * 4 + step % 2 * 8;
    for (int column = 0; column < kGroup; ++column) {
      const uint8_t* from = source + column * row_bytes + step * 2;
      uint8_t* to = unit + column / 4 * 16 + column % 4 * 2;
      to[0] = uint8_t((from[0] & 0x0f) | (from[1] << 4));
      to[1] = uint8_t((from[0] >> 4) | (from[1] & 0xf0));
    }
  }
}

void pack_any_tile(Format format, const uint8_t* source, ptrdiff_t row_bytes, int num_k,
                   uint8_t* tile, Seen* seen) {
  switch (format) {
    case Format::kE4m3:
      return pack_tile<Format::kE4m3>(source, row_bytes, num_k, tile, seen);
    case Format::kBf16:
      return pack_tile<Format::kBf16>(source, row_bytes, num_k, tile, seen);
    case Format::kInt8:
      return pack_tile<Format::kInt8>(source, row_bytes, num_k, tile, seen);
    case Format::kInt4:
      return pack_int4_tile(source, row_bytes, num_k, tile);
  }
}

// Packs the k of one segment of one group; returns its mark. Sets `not_finite`.
uint8_t pack_segment(Format format, const uint8_t* source, ptrdiff_t row_bytes,
                     int num_k, uint8_t* out, bool* not_finite) {
  uint8_t mark = 0;
  for (int k = 0; k < num_k; k += kTileK) {
    Seen seen;
    int tile_k = num_k - k < kTileK ? num_k - k : kTileK;
    pack_any_tile(format, source + packed_bytes(format, k), row_bytes, tile_k,
                  out + packed_bytes(format, k * kGroup), &seen);
    *not_finite |= any_of(seen.not_finite) != 0;
    if (any_of(seen.zero_exponent)) mark |= uint8_t(1u << (k / kTileK));
  }
  return mark;
}

// Returns whether all are finite. Source [16 columns][segments], one segment of it.
bool pack_group_scales(const uint16_t* source, int num_segments, uint16_t* out) {
  bool good = true;
  for (int column = 0; column < kGroup; ++column) {
    out[column] = source[size_t(column) * num_segments];
    good &= (out[column] & 0x7f80) != 0x7f80;
  }
  return good;
}

bool fix_scales(const float* source, size_t count, float* out) {
  bool good = true;
  for (size_t i = 0; i < count; ++i) {
    out[i] = source[i] * kScaleFix;
    good &= std::isfinite(out[i]);
  }
  return good;
}

}  // namespace

Layer::Layer(const LayerShape& shape)
    : shape_(shape),
      weights_(take_huge(weight_bytes())),
      marks_(shape.expert_marks() * shape.num_experts),
      scales_(shape.expert_scales() * shape.num_experts, 1.0f),
      loaded_(new std::atomic<bool>[shape.num_experts]) {
  for (int e = 0; e < shape.num_experts; ++e) loaded_[e] = false;
}

size_t Layer::resident_bytes() const {
  return weight_bytes() + marks_.size() + scales_.size() * sizeof(float);
}

uint8_t* Layer::expert_data(int expert) {
  return weights_.get() + shape_.expert_bytes() * expert;
}

ExpertView Layer::expert(int expert) const {
  return {&shape_, weights_.get() + shape_.expert_bytes() * expert,
          marks_.data() + shape_.expert_marks() * expert,
          scales_.data() + shape_.expert_scales() * expert};
}

PackResult Layer::pack(int expert, int matrix, const SourceMatrix& source) {
  ExpertView view = this->expert(expert);
  Format format = shape_.format;
  bool is_down = matrix == 2, not_finite = false, good_scales = true;
  KAxis axis = is_down ? shape_.down_axis() : shape_.gate_up_axis();
  int num_segments = axis.num_segments();
  int num_groups = is_down ? shape_.hidden_groups() : shape_.column_groups();
  auto* group_scales = const_cast<uint16_t*>(view.group_scales());
  auto* marks = const_cast<uint8_t*>(view.marks);
  for (int group = 0; group < num_groups; ++group) {
    auto* out = const_cast<uint8_t*>(is_down ? view.down(group) : view.gate_up(group));
    const uint8_t* rows = source.data + group * kGroup * source.row_bytes;
    for (int s = 0; s < num_segments; ++s) {
      int begin = axis.begin(s), num_k = axis.end(s) - begin;
      size_t at = size_t(kGroup) * (is_down ? begin : 2 * begin + matrix * num_k);
      size_t entry =
          is_down ? view.down_entry(group, s) : view.gate_up_entry(group, s, matrix);
      uint8_t mark =
          pack_segment(format, rows + packed_bytes(format, begin), source.row_bytes,
                       num_k, out + packed_bytes(format, at), &not_finite);
      if (format == Format::kE4m3) marks[entry] = mark;
      if (is_grouped(format)) {
        auto* scales = static_cast<const uint16_t*>(source.scales) + s;
        scales += size_t(group) * kGroup * num_segments;
        good_scales &=
            pack_group_scales(scales, num_segments, group_scales + entry * kGroup);
      }
    }
  }
  if (not_finite) return PackResult::kBadWeight;
  if (format == Format::kE4m3)
    good_scales =
        pack_block_scales(expert, matrix, static_cast<const float*>(source.scales));
  return good_scales ? PackResult::kOk : PackResult::kBadScale;
}

bool Layer::pack_block_scales(int expert, int matrix, const float* source) {
  size_t blocks = size_t(shape_.column_blocks()) * shape_.hidden_blocks();
  float* out = scales_.data() + shape_.expert_scales() * expert + matrix * blocks;
  return fix_scales(source, blocks, out);
}

PackResult Layer::load(int expert, const SourceMatrix matrices[3], int* bad_matrix) {
  if (loaded_[expert].exchange(false)) --num_loaded_;
  for (int matrix = 0; matrix < 3; ++matrix) {
    PackResult result = pack(expert, matrix, matrices[matrix]);
    if (result != PackResult::kOk) {
      *bad_matrix = matrix;
      return result;
    }
  }
  if (!loaded_[expert].exchange(true)) ++num_loaded_;
  return PackResult::kOk;
}

int Layer::first_missing() const {
  if (num_loaded_ == shape_.num_experts) return -1;
  for (int e = 0; e < shape_.num_experts; ++e)
    if (!loaded_[e]) return e;
  return -1;
}

}  // namespace duck
