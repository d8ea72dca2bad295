// Sparse attention of a panel of rows over the paged caches.
//
// indexer.h chooses each row's positions, or another layer has. They are attended in
// rising order, in tiles of 32: logits and weighted sums are GEMMs, so their order of
// additions is gemm.h's. The weights are rounded to bf16 before they are summed and
// used, so they add up to one. Nothing of this depends on the other rows of the call.
// Source: DeepSeek-V3.2 technical report, 2.1; inference/model.py::MLA.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/indexer.h"

namespace duck {
namespace host {
namespace {

// Rows of one request that share one decoding of the index keys.
constexpr int kRunRows = 64;
// Scores that are held at once: 32 MB, or those of one run.
constexpr size_t kMaxScores = 8 << 20;
// Positions that are held decoded at once: 38 MB in the official sizes. A context that
// is longer is not decoded as a whole.
constexpr int kMaxDecoded = 32 << 10;

// The keys that one row attends to, decoded, in both forms that the GEMMs read.
struct ChosenKeys {
  int count, padded_count;  // a multiple of 32
  const int32_t* positions;
  Rows rows;         // [padded_count][key_dim], zeros behind the last
  uint16_t* values;  // packed: k = position, n = latent channel
};

// Tile by tile: neighbours in `out` are then written one after the other.
inline void pack_values(const Rows& keys, int padded_count, int dim, uint16_t* out) {
  for (int first = 0; first < dim; first += kGroup)
    for (int pair = 0; pair < padded_count / 2; ++pair, out += 2 * kGroup) {
      const uint16_t* even = keys.row(2 * pair) + first;
      const uint16_t* odd = keys.row(2 * pair + 1) + first;
      uint32_t both[kGroup];
      for (int i = 0; i < kGroup; ++i) both[i] = even[i] | uint32_t(odd[i]) << 16;
      std::memcpy(out, both, sizeof both);
    }
}

template <class G>
ChosenKeys gather_keys(const Panel& panel, const RowRun& run, int row, Arena* arena) {
  const AttentionCall& call = *panel.call;
  const AttentionShape& shape = call.layer.shape;
  LatentRow format = latent_row(shape);
  int most = min_int(run.visible_of(row), shape.index_topk);
  auto* positions = static_cast<int32_t*>(arena->take(sizeof(int32_t) * most));
  int count = choose_positions(panel, run, row, arena, positions);
  int padded_count = round_up(count, kTileK);
  int padded_dim = round_up(shape.key_dim(), kTileK);
  Rows rows = take_rows(arena, padded_count, shape.key_dim());
  for (int i = 0; i < count; ++i) {
    if (run.decoded) {
      const uint16_t* key = run.decoded + positions[i] * rows.stride;
      for (int k = 0; k < padded_dim; k += kTileK)
        store_vec16(rows.row(i) + k, load_vec16(key + k));
      continue;
    }
    int64_t slot = call.step.slot(run.request, positions[i]);
    format.template read<G>(call.latent_cache + slot * format.bytes(), rows.row(i));
  }
  for (int i = count; i < padded_count; ++i)
    std::memset(rows.row(i), 0, sizeof(uint16_t) * rows.stride);
  auto* values = static_cast<uint16_t*>(arena->take(
      sizeof(uint16_t) * padded_count * round_up(shape.kv_lora_rank, kGroup)));
  pack_values(rows, padded_count, shape.kv_lora_rank, values);
  return {count, padded_count, positions, rows, values};
}

// logits [count][16 heads] -> [heads][padded_count], scaled.
inline void transpose_logits(const float* logits, int heads, int count,
                             int padded_count, float scale, float* out) {
  for (int first = 0; first < count; first += kVec16) {
    Vec16 rows[kVec16];
    for (int i = 0; i < kVec16; ++i) {
      int row = min_int(first + i, count - 1);
      rows[i] = load_vec16(logits + size_t(row) * kGroup) * scale;
    }
    transpose(rows);
    for (int h = 0; h < heads; ++h)
      store_vec16(out + size_t(h) * padded_count + first, rows[h]);
  }
}

// One head: logits -> bf16 weights in place of them, zeros behind the last; returns the
// weights' sum.
inline float softmax(float* logits, int count, int padded_count, uint16_t* weights) {
  Vec16 peaks = Vec16{} + logits[0];
  int whole = count / kVec16 * kVec16;
  for (int i = 0; i < whole; i += kVec16)
    peaks = max_vec16(load_vec16(logits + i), peaks);
  float peak = fold_max(peaks);
  for (int i = whole; i < count; ++i) peak = logits[i] > peak ? logits[i] : peak;
  for (int i = 0; i < count; ++i)
    weights[i] = bf16_from_float(exp_clamped(logits[i] - peak));
  for (int i = count; i < padded_count; ++i) weights[i] = 0;
  widen(weights, count, logits);
  return sum(logits, count);
}

// Heads [first, first + heads), at most 16, of one row.
template <class G>
void attend_heads(const Panel& panel, int row, int first, int heads,
                  const ChosenKeys& keys, Arena* arena) {
  const AttentionShape& shape = panel.call->layer.shape;
  Arena::Mark mark = arena->mark();
  int query_row = row * shape.num_attention_heads + first;
  int k_tiles = round_up(shape.key_dim(), kTileK) / kTileK;
  auto* tiles =
      static_cast<uint16_t*>(arena->take(sizeof(uint16_t) * k_tiles * kTileElements));
  const Rows& query = panel.queries.query;
  pack_columns({query.row(query_row), query.stride}, heads, k_tiles, tiles);
  float* logits = take_floats(arena, size_t(keys.count) * kGroup);
  Gemm dots = {
      keys.rows.data, keys.rows.stride, keys.count, {tiles, shape.key_dim(), kGroup},
      Out::kFloat,    logits,           kGroup};
  G::run(dots, {0, keys.count}, {0, 1}, arena);
  Rows weights = take_rows(arena, heads, keys.padded_count);
  float* by_head = take_floats(arena, size_t(heads) * keys.padded_count);
  transpose_logits(logits, heads, keys.count, keys.padded_count, shape.scale, by_head);
  float total[kGroup];
  for (int h = 0; h < heads; ++h)
    total[h] = softmax(by_head + size_t(h) * keys.padded_count, keys.count,
                       keys.padded_count, weights.row(h));
  size_t n = shape.kv_lora_rank;
  float* sums = take_floats(arena, heads * n);
  Gemm mix = {
      weights.data, weights.stride, heads, {keys.values, keys.padded_count, int(n)},
      Out::kFloat,  sums,           n};
  G::run(mix, {0, heads}, {0, mix.b.groups()}, arena);
  for (int h = 0; h < heads; ++h) {
    uint16_t* out = panel.latent.row(query_row + h);
    for (size_t i = 0; i < n; ++i) out[i] = bf16_from_float(sums[h * n + i] / total[h]);
  }
  arena->release(mark);
}

// Whether `rows` use the keys of a context more than once on average, so that it is
// decoded as a whole.
inline bool is_decoded(const AttentionShape& shape, int rows, int positions) {
  size_t uses = size_t(rows) * min_int(positions, shape.index_topk);
  return uses > size_t(positions) && positions <= kMaxDecoded;
}

// Rows of the panel that belong to requests, cut into runs; rows from `begin` on,
// as many as kMaxScores and kMaxDecoded allow. Returns the first row left over.
inline int take_runs(const Panel& panel, int begin, int end, Arena* arena, RowRun* runs,
                     int* count) {
  const AttentionCall& call = *panel.call;
  const StepView& step = call.step;
  const AttentionShape& shape = call.layer.shape;
  size_t num_scores = 0, num_decoded = 0;
  int request = 0, row = begin;
  *count = 0;
  while (row < end) {
    int call_row = panel.begin + row;
    while (step.row_begin[request + 1] <= call_row) ++request;
    int last = min_int(end, step.row_begin[request + 1] - panel.begin);
    int visible = step.first_visible[request] + call_row - step.row_begin[request];
    int positions = visible + last - row - 1;
    bool is_another = *count == 0 || runs[*count - 1].request != request;
    if (is_another && is_decoded(shape, last - row, positions)) {
      if (*count > 0 && num_decoded + positions > kMaxDecoded) break;
      num_decoded += positions;
    }
    RowRun run = {request, row,    min_int(last, row + kRunRows), visible, nullptr,
                  0,       nullptr};
    if (run.num_positions() > shape.index_topk && !call.is_chosen) {
      run.stride = round_up(run.num_positions(), 16);
      size_t size = size_t(run.end - run.begin) * run.stride;
      if (*count > 0 && num_scores + size > kMaxScores) break;
      num_scores += size;
      run.scores = take_floats(arena, size);
    }
    runs[(*count)++] = run;
    row = run.end;
  }
  return row;
}

// Decodes the contexts whose keys the rows use more than once on average.
template <class G>
void decode_contexts(const Threads& threads, const Panel& panel, RowRun* runs,
                     int count) {
  const AttentionCall& call = *panel.call;
  LatentRow format = latent_row(call.layer.shape);
  for (int first = 0, next; first < count; first = next) {
    for (next = first; next < count; ++next)
      if (runs[next].request != runs[first].request) break;
    int rows = runs[next - 1].end - runs[first].begin;
    int positions = runs[next - 1].num_positions();
    if (!is_decoded(call.layer.shape, rows, positions)) continue;
    Rows keys = take_rows(threads.shared, positions, call.layer.shape.key_dim());
    for_rows(threads, positions, size_t(format.bytes()), [&](Range range, Arena*) {
      for (int i = range.begin; i < range.end; ++i) {
        int64_t slot = call.step.slot(runs[first].request, i);
        format.template read<G>(call.latent_cache + slot * format.bytes(), keys.row(i));
      }
    });
    for (int s = first; s < next; ++s) runs[s].decoded = keys.data;
  }
}

// Attends rows [begin, end), which the runs cover; the heads of few rows are shared
// out too, each share with its own copy of the keys.
template <class G>
void attend_runs(const Threads& threads, const Panel& panel, const RowRun* runs,
                 int begin, int end) {
  const AttentionShape& shape = panel.call->layer.shape;
  int rows = end - begin, groups = ceil_div(shape.num_attention_heads, kGroup);
  int shares = max_int(1, min_int(groups, threads.count() / rows));
  size_t work =
      size_t(shape.index_topk) * shape.key_dim() * (1 + shape.num_attention_heads / 8);
  for_items(threads, rows * shares, work / shares, [&](int item, Arena* arena) {
    Arena::Mark mark = arena->mark();
    int row = begin + item / shares, s = 0;
    while (runs[s].end <= row) ++s;
    ChosenKeys keys = gather_keys<G>(panel, runs[s], row, arena);
    if (item % shares == 0) keep_choice(panel, runs[s], row, keys.positions);
    Range mine = share(groups, 1, item % shares, shares);
    for (int g = mine.begin; g < mine.end; ++g) {
      int head = g * kGroup, heads = min_int(kGroup, shape.num_attention_heads - head);
      attend_heads<G>(panel, row, head, heads, keys, arena);
    }
    arena->release(mark);
  });
}

// Attends the panel's rows [begin, end), all of which belong to requests.
template <class G>
void attend_rows(const Threads& threads, const Panel& panel, int begin, int end) {
  Arena::Mark mark = threads.shared->mark();
  auto* runs =
      static_cast<RowRun*>(threads.shared->take(sizeof(RowRun) * (end - begin)));
  while (begin < end) {
    // A turn gives back what it takes: the next one needs as much.
    Arena::Mark turn = threads.shared->mark();
    int count;
    int next = take_runs(panel, begin, end, threads.shared, runs, &count);
    decode_contexts<G>(threads, panel, runs, count);
    score_runs<G>(threads, panel, runs, count);
    attend_runs<G>(threads, panel, runs, begin, next);
    threads.shared->release(turn);
    begin = next;
  }
  threads.shared->release(mark);
}

}  // namespace
}  // namespace host
}  // namespace duck
