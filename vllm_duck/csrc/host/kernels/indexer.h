// Which positions a row attends to: the lightning indexer.
//
// A row that sees at most index_topk positions attends to all of them. Of more, the
// indexer chooses: score(s) = scale(s) * sum over heads h, in rising order, of
// w_h * relu(q_h . k_s).
// Source: DeepSeek-V3.2 technical report, 2.1; inference/model.py::Indexer.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/project.h"
#include "host/kernels/select.h"

namespace duck {
namespace host {
namespace {

// Positions whose index keys are decoded at once.
constexpr int kKeyBlock = 256;
// Rows of the GEMM of index queries: bounds its result to an L2 cache.
constexpr int kIndexGemmRows = 256;
// Some rows of one request. Row numbers are the panel's.
struct RowRun {
  int request;
  int begin, end;
  int visible;    // of row `begin`; each next row sees one more
  float* scores;  // [end - begin][stride], or null if no row has to choose
  int stride;
  // All latent keys of the request, [num_positions][padded key_dim], or null.
  const uint16_t* decoded;

  int visible_of(int row) const { return visible + row - begin; }
  int num_positions() const { return visible_of(end - 1); }
};

struct Panel {
  const AttentionCall* call;
  int begin;  // its first row in the call
  QueryRows queries;
  const float* index_weight;  // of the panel's first row
  Rows latent;                // out, [rows * heads][kv_lora_rank]
};

// Writes 16 rows of bf16 as the columns of one group of packed tiles; those beyond
// `count` are copies of the first.
inline void pack_columns(const Rows& rows, int count, int k_tiles, uint16_t* tiles) {
  for (int t = 0; t < k_tiles; ++t) {
    Vec16 pairs[kVec16];
    for (int i = 0; i < kVec16; ++i)
      pairs[i] = load_vec16(rows.row(i < count ? i : 0) + t * kTileK);
    transpose(pairs);
    for (int i = 0; i < kVec16; ++i)
      store_vec16(tiles + t * kTileElements + i * 2 * kGroup, pairs[i]);
  }
}

// Decodes index keys [from, from + count) of a request into packed tiles.
template <class G>
void pack_keys(const AttentionCall& call, int request, int from, int count,
               Arena* arena, uint16_t* tiles, float* scales) {
  IndexRow format = index_row(call.layer.shape);
  int k_tiles = round_up(format.dim, kTileK) / kTileK;
  Arena::Mark mark = arena->mark();
  Rows rows = take_rows(arena, kGroup, format.dim);
  for (int first = 0; first < count; first += kGroup) {
    int columns = min_int(kGroup, count - first);
    for (int i = 0; i < columns; ++i) {
      int64_t slot = call.step.slot(request, from + first + i);
      const uint8_t* row = call.index_cache + slot * format.bytes();
      scales[first + i] = format.template read<G>(row, rows.row(i));
    }
    pack_columns(rows, columns, k_tiles, tiles + size_t(first) * k_tiles * kTileK);
  }
  arena->release(mark);
}

// dots [heads][stride] -> scores of `count` positions.
inline void reduce_heads(const float* dots, size_t stride, const float* weight,
                         int heads, const float* scales, int count, float* scores) {
  for (int i = 0; i < count; ++i) scores[i] = 0;
  for (int h = 0; h < heads; ++h) {
    const float* row = dots + h * stride;
    float w = weight[h];
    for (int i = 0; i < count; ++i) scores[i] += w * (row[i] > 0.0f ? row[i] : 0.0f);
  }
  for (int i = 0; i < count; ++i) scores[i] *= scales[i];
}

// Scores positions [block * kKeyBlock, ...) for the rows of the run that see them
// and have a choice.
template <class G>
void score_block(const Panel& panel, const RowRun& run, int block, Arena* arena) {
  const AttentionShape& shape = panel.call->layer.shape;
  int from = block * kKeyBlock;
  int count = min_int(kKeyBlock, run.num_positions() - from);
  int least = max_int(from, shape.index_topk) + 1;
  int row = max_int(run.begin, run.begin + least - run.visible);
  if (row >= run.end) return;
  Arena::Mark mark = arena->mark();
  int padded_dim = round_up(shape.index_head_dim, kTileK);
  auto* tiles =
      static_cast<uint16_t*>(arena->take(sizeof(uint16_t) * padded_dim * kKeyBlock));
  float* scales = take_floats(arena, kKeyBlock);
  pack_keys<G>(*panel.call, run.request, from, count, arena, tiles, scales);
  int heads = shape.index_n_heads;
  int rows_at_once = max_int(1, kIndexGemmRows / heads);
  float* dots = take_floats(arena, size_t(rows_at_once) * heads * kKeyBlock);
  for (; row < run.end; row += rows_at_once) {
    int rows = min_int(rows_at_once, run.end - row);
    Gemm gemm = {panel.queries.index.row(row * heads),
                 panel.queries.index.stride,
                 rows * heads,
                 {tiles, shape.index_head_dim, count},
                 Out::kFloat,
                 dots,
                 size_t(kKeyBlock)};
    G::run(gemm, {0, gemm.rows}, {0, gemm.b.groups()}, arena);
    for (int r = 0; r < rows; ++r) {
      size_t score_row = row + r - run.begin;
      reduce_heads(dots + size_t(r) * heads * kKeyBlock, kKeyBlock,
                   panel.index_weight + size_t(row + r) * heads, heads, scales, count,
                   run.scores + score_row * run.stride + from);
    }
  }
  arena->release(mark);
}

// Scores every position that a row of the runs may choose from.
template <class G>
void score_runs(const Threads& threads, const Panel& panel, const RowRun* runs,
                int count) {
  const AttentionShape& shape = panel.call->layer.shape;
  auto* first_block =
      static_cast<int*>(threads.shared->take(sizeof(int) * (count + 1)));
  first_block[0] = 0;
  for (int s = 0; s < count; ++s) {
    int blocks = (runs[s].num_positions() + kKeyBlock - 1) / kKeyBlock;
    first_block[s + 1] = first_block[s] + (runs[s].scores ? blocks : 0);
  }
  size_t work =
      size_t(kKeyBlock) * shape.index_head_dim * (1 + shape.index_n_heads / 8);
  for_items(threads, first_block[count], work, [&](int item, Arena* arena) {
    int s = 0;
    while (first_block[s + 1] <= item) ++s;
    score_block<G>(panel, runs[s], item - first_block[s], arena);
  });
}

// Where the call has a panel's row's choice.
inline int32_t* choice_of(const Panel& panel, int row) {
  size_t call_row = size_t(panel.begin) + row;
  return panel.call->chosen + call_row * panel.call->layer.shape.index_topk;
}

// The positions that `row` attends to; returns how many.
inline int choose_positions(const Panel& panel, const RowRun& run, int row,
                            Arena* arena, int32_t* positions) {
  int visible = run.visible_of(row), topk = panel.call->layer.shape.index_topk;
  if (visible <= topk) {
    for (int i = 0; i < visible; ++i) positions[i] = i;
    return visible;
  }
  if (panel.call->is_chosen) {
    std::memcpy(positions, choice_of(panel, row), sizeof(int32_t) * topk);
    return topk;
  }
  Arena::Mark mark = arena->mark();
  auto* keys = static_cast<uint32_t*>(arena->take(sizeof(uint32_t) * visible));
  const float* scores = run.scores + size_t(row - run.begin) * run.stride;
  select_best(scores, visible, topk, keys, positions);
  arena->release(mark);
  return topk;
}

// Keeps a choice for the layers behind, which attend to the same.
inline void keep_choice(const Panel& panel, const RowRun& run, int row,
                        const int32_t* positions) {
  const AttentionCall& call = *panel.call;
  int topk = call.layer.shape.index_topk;
  if (!call.chosen || call.is_chosen || run.visible_of(row) <= topk) return;
  std::memcpy(choice_of(panel, row), positions, sizeof(int32_t) * topk);
}

}  // namespace
}  // namespace host
}  // namespace duck
