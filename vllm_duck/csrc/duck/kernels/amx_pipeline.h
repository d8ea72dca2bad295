// The decode regime on the tile unit, up to 16 rows: while one block of weights is
// decoded into the L1 cache, the block before it is multiplied. Without that overlap
// the unit's latency would be added to each block.
#pragma once

#include "duck/kernels/amx_products.h"
#include "duck/kernels/amx_weights.h"

namespace duck {
namespace {

// Gate and up of one group, or groups of down: as many as there are C tiles. Fewer
// would leave the unit's latency in sight, because a down block is just one or two
// tiles deep.
constexpr int kMaxMatrices = 4;
constexpr int kTotalStride = kMaxMatrices * kGroup;

// One segment of up to kMaxMatrices matrices.
struct Block {
  ScaleSegment segments[kMaxMatrices];
  int matrices;
  const uint8_t* a;  // activations [row][k] at this segment
  ptrdiff_t a_row_bytes;
  SegmentScale scales[kMaxMatrices];
  float* total;  // [row][matrix][16], kTotalStride apart
};

class TilePipeline {
 public:
  // The halves are not a multiple of 4 KiB apart: a load from one would wait for every
  // store to the other that has the same low 12 address bits.
  static constexpr size_t kHalfBytes = kMaxMatrices * kSegmentTileBytes + 2048;
  static constexpr size_t kScratchBytes = 2 * kHalfBytes;

  // `first_weights` is where the stream of weights begins.
  TilePipeline(int num_rows, const uint8_t* first_weights, uint8_t* scratch)
      : num_rows_(num_rows), prefetch_(first_weights), tiles_(scratch) {}

  // Decodes `next` (null: nothing is left) and finishes the block before it.
  void advance(const Block* next) {
    uint8_t* into = tiles_ + parity_ * kHalfBytes;
    int to_decode = next ? next->segments[0].num_tiles() : 0;
    int to_multiply = has_block_ ? block_.segments[0].num_tiles() : 0;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int t = 0; t < to_decode || t < to_multiply; ++t) {
      if (t < to_decode)
        for (int m = 0; m < next->matrices; ++m)
          prefetch_ += next->segments[m].convert_tile(t, prefetch_,
                                                      into + m * kSegmentTileBytes);
      if (t < to_multiply) multiply_tile(t);
    }
    if (has_block_) add_block();
    has_block_ = next != nullptr;
    if (!next) return;
    block_ = *next;
    for (int m = 0; m < next->matrices; ++m) {
      const ScaleSegment& segment = next->segments[m];
      b_[m] = segment.in_place() ? segment.source : into + m * kSegmentTileBytes;
    }
    parity_ ^= 1;
  }

 private:
  void multiply_tile(int t) {
    tile_load<4>(block_.a + t * kTileRowBytes, block_.a_row_bytes);
    tile_load<6>(b_[0] + t * kTileBytes, kTileRowBytes);
    tile_multiply<0, 4, 6>();
    if (block_.matrices == 1) return;
    tile_load<7>(b_[1] + t * kTileBytes, kTileRowBytes);
    tile_multiply<1, 4, 7>();
    if (block_.matrices == 2) return;
    tile_load<6>(b_[2] + t * kTileBytes, kTileRowBytes);
    tile_multiply<2, 4, 6>();
    if (block_.matrices == 3) return;
    tile_load<7>(b_[3] + t * kTileBytes, kTileRowBytes);
    tile_multiply<3, 4, 7>();
  }

  void add_block() {
    alignas(64) float c[kMaxMatrices][kTileRows][kGroup];
    tile_store<0>(c[0], kTileRowBytes);
    if (block_.matrices > 1) tile_store<1>(c[1], kTileRowBytes);
    if (block_.matrices > 2) tile_store<2>(c[2], kTileRowBytes);
    if (block_.matrices > 3) tile_store<3>(c[3], kTileRowBytes);
    for (int r = 0; r < num_rows_; ++r)
      for (int m = 0; m < block_.matrices; ++m)
        add_scaled_group(scale_vector(block_.scales[m]), c[m][r],
                         block_.total + r * kTotalStride + m * kGroup);
  }

  int num_rows_;
  const uint8_t* prefetch_;  // rises steadily, while tiles alternate between matrices
  uint8_t* tiles_;
  int parity_ = 0;
  bool has_block_ = false;
  Block block_;
  const uint8_t* b_[kMaxMatrices];
};

// Streams num_items items of num_segments blocks each. An item's total is complete,
// and finish(item, total) called, when the next item has begun.
template <class MakeBlock, class Finish>
inline void stream_items(int num_items, int num_segments, int num_rows,
                         uint8_t* scratch, const MakeBlock& make_block,
                         const Finish& finish) {
  TilePipeline pipeline(num_rows, make_block(0, 0).segments[0].source, scratch);
  alignas(64) float totals[2][kTileRows * kTotalStride];
  for (int item = 0; item < num_items; ++item) {
    float* total = totals[item % 2];
    std::memset(total, 0, size_t(num_rows) * kTotalStride * sizeof(float));
    for (int s = 0; s < num_segments; ++s) {
      Block block = make_block(item, s);
      block.total = total;
      pipeline.advance(&block);
      if (s == 0 && item > 0) finish(item - 1, totals[(item - 1) % 2]);
    }
  }
  pipeline.advance(nullptr);
  finish(num_items - 1, totals[(num_items - 1) % 2]);
}

}  // namespace
}  // namespace duck
