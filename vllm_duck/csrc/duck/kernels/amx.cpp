// Kernels for the AMX tile unit, for any number of rows: weights become bf16 tiles in
// the L1 cache, segment by segment, and are multiplied with all rows.
#include "duck/kernels/kernel_table.h"

#if defined(__x86_64__) && defined(__linux__)
#include <algorithm>
#include <cstdint>
#include <cstring>
#pragma GCC target("avx512f,avx512bw,avx512vl,fma")

#include "duck/kernels/amx_pipeline.h"
#include "duck/kernels/amx_products.h"
#include "duck/kernels/amx_weights.h"
#include "simd/amx_probe.h"
#include "simd/silu.h"

namespace duck {
namespace {

// Column groups that share one copy of the activations: 4 of them with gate and up are
// 32 KiB of tiles, two thirds of an L1 cache.
constexpr int kMaxGroups = 4;

// How many rows a tile gets: as even as possible, so 17 rows are 9 and 9, not 16
// and 16.
struct RowTiles {
  int num_tiles, rows_per_tile;

  explicit RowTiles(int num_rows)
      : num_tiles(ceil_div(num_rows, kTileRows)),
        rows_per_tile(ceil_div(num_rows, num_tiles)) {}
  int padded_rows() const { return num_tiles * rows_per_tile; }
};

// Copies k of one segment of each row's input: [tile][row][32], padded with zeros.
void gather_segment(const ExpertRows& rows, const uint16_t* hidden, int k, int num_k,
                    int padded_rows, uint8_t* out) {
  int stride = rows.expert.shape->hidden_size;
  int num_tiles = ceil_div(num_k, kTileK);
  for (int r = 0; r < rows.num_rows; ++r) {
    const uint16_t* row = hidden + size_t(rows.tokens[r]) * stride + k;
    for (int t = 0; t < num_tiles; ++t) {
      int left = num_k - t * kTileK;
      __mmask32 mask = left >= kTileK ? ~0u : (1u << left) - 1;
      __m512i values = _mm512_maskz_loadu_epi16(mask, row + t * kTileK);
      _mm512_store_si512(out + (size_t(t) * padded_rows + r) * kTileRowBytes, values);
    }
    Avx512Simd::prefetch(row + kScaleBlock);
  }
}

struct GateUpScratch {
  uint8_t* panel;  // [tile of the segment][padded row][32] bf16
  uint8_t* tiles;  // [group][gate, up][tile]
  float* totals;   // [group][padded row][gate, up][16]

  GateUpScratch(uint8_t* scratch, int padded_rows)
      : panel(scratch),
        tiles(panel + size_t(kSegmentTileBytes / kTileRows) * padded_rows),
        totals(reinterpret_cast<float*>(tiles + kMaxGroups * 2 * kSegmentTileBytes)) {}
  static size_t bytes(int padded_rows) {
    return size_t(padded_rows) * (kSegmentTileBytes / kTileRows + kMaxGroups * 128) +
           kMaxGroups * 2 * kSegmentTileBytes;
  }
};

// One segment of `num_groups` groups from `first_group` on, all rows.
void multiply_segment(const ExpertRows& rows, const RowTiles& row_tiles,
                      int first_group, int num_groups, int segment,
                      const GateUpScratch& scratch) {
  const ExpertView& expert = rows.expert;
  int num_tiles = gate_up_segment(expert, first_group, segment, 0).num_tiles();
  int per_tile = row_tiles.rows_per_tile;
  const uint8_t* b[kMaxGroups][2];
  __m512 scales[kMaxGroups][2];
  for (int g = 0; g < num_groups; ++g) {
    int group = first_group + g;
    for (int m = 0; m < 2; ++m) {
      scales[g][m] = scale_vector(expert.gate_up_scale(group, segment, m));
      b[g][m] = gate_up_segment(expert, group, segment, m)
                    .convert(scratch.tiles + (2 * g + m) * kSegmentTileBytes);
    }
  }
  ptrdiff_t panel_tile = ptrdiff_t(row_tiles.padded_rows()) * kTileRowBytes;
  Products products;
  for (int rt = 0; rt < row_tiles.num_tiles; rt += 2) {
    int pair = rt + 1 < row_tiles.num_tiles ? 2 : 1;
    int row = rt * per_tile;
    Activations a = {scratch.panel + row * kTileRowBytes, kTileRowBytes, panel_tile,
                     per_tile * kTileRowBytes};
    for (int g = 0; g < num_groups; ++g) {
      float* total =
          scratch.totals + (size_t(g) * row_tiles.padded_rows() + row) * 2 * kGroup;
      multiply_any(pair, 2, a, b[g], num_tiles, &products);
      add_scaled(products, pair, per_tile, 2, scales[g], total);
    }
  }
}

void gate_up_many(const ExpertRows& rows, int begin, int end, const HiddenRows& hidden,
                  uint8_t* scratch_at) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.gate_up_axis();
  RowTiles row_tiles(rows.num_rows);
  int padded_rows = row_tiles.padded_rows();
  GateUpScratch scratch(scratch_at, padded_rows);
  tile_configure(row_tiles.rows_per_tile);
  for (int first = begin; first < end; first += kMaxGroups) {
    int num_groups = end - first < kMaxGroups ? end - first : kMaxGroups;
    std::memset(scratch.totals, 0, size_t(num_groups) * padded_rows * 128);
    for (int s = 0; s < axis.num_segments(); ++s) {
      int k = axis.begin(s);
      gather_segment(rows, hidden.bf16, k, axis.end(s) - k, padded_rows, scratch.panel);
      multiply_segment(rows, row_tiles, first, num_groups, s, scratch);
    }
    for (int g = 0; g < num_groups; ++g) {
      uint16_t* act = rows.act + shape.act_offset(first + g);
      const float* total = scratch.totals + size_t(g) * padded_rows * 2 * kGroup;
      for (int r = 0; r < rows.num_rows; ++r, total += 2 * kGroup)
        silu_mul_group(total, total + kGroup, act + size_t(r) * shape.act_stride());
    }
  }
}

// y += topk weight * total, for the two row tiles from row `first_row` on.
void add_to_tokens(const ExpertRows& rows, int first_row, int num_rows, int matrices,
                   const float* total, int total_stride, float* y, size_t y_stride) {
  if (first_row + num_rows > rows.num_rows) num_rows = rows.num_rows - first_row;
  for (int r = first_row; r < first_row + num_rows; ++r, total += total_stride) {
    __m512 weight = _mm512_set1_ps(rows.weights[r]);
    float* out = y + rows.tokens[r] * y_stride;
    for (int m = 0; m < matrices; ++m) {
      __m512 sum = _mm512_loadu_ps(out + m * kGroup);
      __m512 term = _mm512_mul_ps(weight, _mm512_load_ps(total + m * kGroup));
      _mm512_storeu_ps(out + m * kGroup, _mm512_add_ps(sum, term));
    }
  }
}

// One or two groups for all rows; b[group][segment] are their tiles.
void down_groups(const ExpertRows& rows, const RowTiles& row_tiles, int first_group,
                 int matrices, const uint8_t* const (*b)[2], float* y,
                 size_t y_stride) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.down_axis();
  ptrdiff_t row_bytes = ptrdiff_t(shape.act_stride()) * 2;
  int per_tile = row_tiles.rows_per_tile;
  Products products;
  alignas(64) float total[2 * kTileRows * 2 * kGroup];
  for (int rt = 0; rt < row_tiles.num_tiles; rt += 2) {
    int pair = rt + 1 < row_tiles.num_tiles ? 2 : 1;
    int row = rt * per_tile, at = 0;
    std::memset(total, 0, size_t(pair) * per_tile * 2 * kGroup * sizeof(float));
    for (int s = 0; s < axis.num_segments(); ++s) {
      int num_tiles = ceil_div(axis.end(s) - axis.begin(s), kTileK);
      auto* data =
          reinterpret_cast<const uint8_t*>(rows.act) + row * row_bytes + at * 2;
      Activations a = {data, row_bytes, kTileRowBytes, per_tile * row_bytes};
      __m512 scale[2] = {
          scale_vector(rows.expert.down_scale(first_group, s)),
          scale_vector(rows.expert.down_scale(first_group + matrices - 1, s))};
      multiply_any(pair, matrices, a, b[s], num_tiles, &products);
      add_scaled(products, pair, per_tile, matrices, scale, total);
      at += num_tiles * kTileK;
    }
    add_to_tokens(rows, row, pair * per_tile, matrices, total, 2 * kGroup, y, y_stride);
  }
}

size_t down_scratch_bytes(const LayerShape& shape) {
  size_t segments = shape.down_axis().num_segments();
  size_t tiles = segment_tiles(shape.format);
  return segments * (2 * tiles * kTileBytes + 2 * sizeof(uint8_t*));
}

void down_many(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
               uint8_t* scratch) {
  const ExpertView& expert = rows.expert;
  int segments = expert.shape->down_axis().num_segments();
  int tile_bytes = segment_tiles(expert.shape->format) * kTileBytes;
  RowTiles row_tiles(rows.num_rows);
  tile_configure(row_tiles.rows_per_tile);
  auto* b = reinterpret_cast<const uint8_t*(*)[2]>(scratch + segments * 2 * tile_bytes);
  for (int group = begin; group < end; group += 2, y += 2 * kGroup) {
    int matrices = group + 1 < end ? 2 : 1;
    for (int m = 0; m < matrices; ++m)
      for (int s = 0; s < segments; ++s)
        b[s][m] = down_segment(expert, group + m, s)
                      .convert(scratch + (2 * s + m) * tile_bytes);
    down_groups(rows, row_tiles, group, matrices, b, y, y_stride);
  }
}

// Rows of a tile are equally far apart; so may the rows of the call that chose this
// expert be, and then they need no copy.
bool evenly_spaced(const ExpertRows& rows) {
  for (int r = 2; r < rows.num_rows; ++r)
    if (rows.tokens[r] - rows.tokens[r - 1] != rows.tokens[1] - rows.tokens[0])
      return false;
  return true;
}

// [row][padded hidden], in place or copied to `panel`.
const uint8_t* few_rows_input(const ExpertRows& rows, const uint16_t* hidden,
                              uint8_t* panel, ptrdiff_t* row_bytes) {
  const LayerShape& shape = *rows.expert.shape;
  KAxis axis = shape.gate_up_axis();
  ptrdiff_t hidden_bytes = ptrdiff_t(shape.hidden_size) * 2;
  if (shape.hidden_size % kTileK == 0 && evenly_spaced(rows)) {
    int step = rows.num_rows > 1 ? rows.tokens[1] - rows.tokens[0] : 0;
    *row_bytes = step * hidden_bytes;
    return reinterpret_cast<const uint8_t*>(hidden) + rows.tokens[0] * hidden_bytes;
  }
  *row_bytes = ptrdiff_t(axis.padded_length()) * 2;
  for (int r = 0; r < rows.num_rows; ++r) {
    uint8_t* row = panel + r * *row_bytes;
    std::memset(row + hidden_bytes, 0, *row_bytes - hidden_bytes);
    std::memcpy(row, hidden + size_t(rows.tokens[r]) * shape.hidden_size, hidden_bytes);
  }
  return panel;
}

void gate_up_few(const ExpertRows& rows, int begin, int end, const HiddenRows& hidden,
                 uint8_t* scratch) {
  const ExpertView& expert = rows.expert;
  const LayerShape& shape = *expert.shape;
  KAxis axis = shape.gate_up_axis();
  ptrdiff_t row_bytes;
  const uint8_t* a = few_rows_input(rows, hidden.bf16,
                                    scratch + TilePipeline::kScratchBytes, &row_bytes);
  auto make_block = [&](int item, int s) {
    int group = begin + item;
    Block block;
    for (int m = 0; m < 2; ++m) {
      block.segments[m] = gate_up_segment(expert, group, s, m);
      block.scales[m] = expert.gate_up_scale(group, s, m);
    }
    block.matrices = 2;
    block.a = a + axis.begin(s) * 2;
    block.a_row_bytes = row_bytes;
    return block;
  };
  auto finish = [&](int item, const float* total) {
    uint16_t* act = rows.act + shape.act_offset(begin + item);
    for (int r = 0; r < rows.num_rows; ++r, total += kTotalStride)
      silu_mul_group(total, total + kGroup, act + size_t(r) * shape.act_stride());
  };
  stream_items(end - begin, axis.num_segments(), rows.num_rows, scratch, make_block,
               finish);
}

void down_few(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
              uint8_t* scratch) {
  const ExpertView& expert = rows.expert;
  KAxis axis = expert.shape->down_axis();
  auto first_group = [&](int item) { return begin + kMaxMatrices * item; };
  auto num_groups = [&](int item) {
    return std::min(kMaxMatrices, end - first_group(item));
  };
  auto make_block = [&](int item, int s) {
    int group = first_group(item);
    Block block;
    block.matrices = num_groups(item);
    for (int m = 0; m < block.matrices; ++m) {
      block.segments[m] = down_segment(expert, group + m, s);
      block.scales[m] = expert.down_scale(group + m, s);
    }
    block.a = reinterpret_cast<const uint8_t*>(rows.act + axis.padded_begin(s));
    block.a_row_bytes = ptrdiff_t(expert.shape->act_stride()) * 2;
    return block;
  };
  auto finish = [&](int item, const float* total) {
    add_to_tokens(rows, 0, rows.num_rows, num_groups(item), total, kTotalStride,
                  y + item * kTotalStride, y_stride);
  };
  stream_items(ceil_div(end - begin, kMaxMatrices), axis.num_segments(), rows.num_rows,
               scratch, make_block, finish);
}

// For so few rows, fp32 vectors need no more instructions than the tiles' upkeep.
constexpr int kVectorRows = 2;

const KernelTable& vectors() { return *avx512_kernels(); }

void gate_up(const ExpertRows& rows, int begin, int end, const HiddenRows& hidden,
             uint8_t* scratch) {
  if (rows.num_rows <= kVectorRows)
    return vectors().gate_up(rows, begin, end, hidden, scratch);
  if (rows.num_rows > kTileRows) return gate_up_many(rows, begin, end, hidden, scratch);
  tile_configure(rows.num_rows);
  gate_up_few(rows, begin, end, hidden, scratch);
}

void down(const ExpertRows& rows, int begin, int end, float* y, size_t y_stride,
          uint8_t* scratch) {
  if (rows.num_rows <= kVectorRows)
    return vectors().down(rows, begin, end, y, y_stride, scratch);
  if (rows.num_rows > kTileRows)
    return down_many(rows, begin, end, y, y_stride, scratch);
  tile_configure(rows.num_rows);
  down_few(rows, begin, end, y, y_stride, scratch);
}

size_t scratch_bytes(const LayerShape& shape, int max_rows) {
  size_t few = TilePipeline::kScratchBytes +
               size_t(kTileRows) * shape.gate_up_axis().padded_length() * 2;
  size_t lone = vectors().scratch_bytes(shape, kVectorRows);
  size_t many = GateUpScratch::bytes(max_rows + kTileRows) + down_scratch_bytes(shape);
  return std::max({lone, few, many});
}

}  // namespace

const KernelTable* amx_kernels() {
  if (!avx512_kernels() || !amx_is_usable()) return nullptr;
  static const KernelTable table = {
      "amx", kVectorRows, vectors().widen, scratch_bytes, gate_up, down, tile_release};
  return &table;
}

}  // namespace duck
#else
const duck::KernelTable* duck::amx_kernels() { return nullptr; }
#endif
