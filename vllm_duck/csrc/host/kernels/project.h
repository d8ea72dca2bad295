// The attention block's projections: from hidden states to queries and cached keys.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/cache_rows.h"
#include "host/kernels/dense.h"
#include "host/kernels/kernels.h"

namespace duck {
namespace host {
namespace {

inline LatentRow latent_row(const AttentionShape& shape) {
  return {shape.kv_lora_rank, shape.qk_rope_head_dim, shape.is_fp8};
}

inline IndexRow index_row(const AttentionShape& shape) {
  return {shape.index_head_dim, shape.is_fp8};
}

// What the keys' projection leaves for the queries: for all rows of the call.
struct LowRows {
  Rows query;           // [rows][q_lora_rank], normed
  float* index_weight;  // [rows][index_n_heads]
};

// What attention reads, for a panel of rows.
struct QueryRows {
  Rows query;  // [rows * heads][key_dim]: the latent part, the rotated rope part
  Rows index;  // [rows * index_n_heads][index_head_dim], rotated
};

// One row of the down projection -> caches, low query, index weights.
inline void split_down(const AttentionCall& call, const float* down, int row,
                       float* scratch, const LowRows& low) {
  const AttentionView& layer = call.layer;
  const AttentionShape& shape = layer.shape;
  const float* rotation = call.rotations + size_t(row) * shape.qk_rope_head_dim;
  rms_norm(down, layer.q_norm.weight, shape.q_lora_rank, layer.q_norm.eps,
           low.query.row(row));
  const float* kv = down + shape.q_lora_rank;
  const float* index_key = kv + shape.key_dim();
  const float* weight = index_key + shape.index_head_dim;
  for (int h = 0; h < shape.index_n_heads; ++h)
    low.index_weight[size_t(row) * shape.index_n_heads + h] =
        weight[h] * shape.index_scale;
  int64_t slot = row < call.step.num_rows ? call.step.slots[row] : -1;
  if (slot < 0) return;
  float *latent = scratch, *rope = scratch + shape.kv_lora_rank;
  rms_norm(kv, layer.kv_norm.weight, shape.kv_lora_rank, layer.kv_norm.eps, latent);
  rotate(kv + shape.kv_lora_rank, rotation, shape.qk_rope_head_dim, rope);
  LatentRow latent_format = latent_row(shape);
  latent_format.write(latent, rope, call.latent_cache + slot * latent_format.bytes());
  if (!shape.has_indexer()) return;
  float* key = scratch;
  std::memcpy(key, index_key, sizeof(float) * shape.index_head_dim);
  layer_norm(key, layer.index_norm.weight, layer.index_bias, shape.index_head_dim,
             layer.index_norm.eps);
  rotate(key, rotation, shape.qk_rope_head_dim, key);
  IndexRow index_format = index_row(shape);
  index_format.write(key, call.index_cache + slot * index_format.bytes());
}

// Rows [begin, begin + rows): caches their keys and fills `low`.
template <class G>
void project_keys(const Threads& threads, const AttentionCall& call, int begin,
                  int rows, const LowRows& low) {
  const AttentionShape& shape = call.layer.shape;
  Arena::Mark mark = threads.shared->mark();
  Rows x = take_rows(threads.shared, rows, shape.hidden_size);
  const uint16_t* hidden = call.hidden + size_t(begin) * shape.hidden_size;
  norm_rows(threads, {call.layer.input_norm, rows, shape.hidden_size, hidden, x.data},
            x.stride);
  size_t n = call.layer.down.n;
  float* down = take_floats(threads.shared, rows * n);
  run_gemm<G>(threads, {x.data, x.stride, rows, call.layer.down, Out::kFloat, down, n});
  for_rows(threads, rows, n * 16, [&](Range range, Arena* arena) {
    Arena::Mark mine = arena->mark();
    float* scratch = take_floats(arena, shape.key_dim() + shape.index_head_dim);
    for (int r = range.begin; r < range.end; ++r)
      split_down(call, down + r * n, begin + r, scratch, low);
    arena->release(mine);
  });
  threads.shared->release(mark);
}

// One row of the up projection -> nope parts [heads], rotated rope and index queries.
inline void split_up(const AttentionShape& shape, const float* up,
                     const float* rotation, int row, const Rows& nope,
                     const QueryRows& out) {
  for (int h = 0; h < shape.num_attention_heads; ++h, up += shape.qk_dim()) {
    size_t at = size_t(row) * shape.num_attention_heads + h;
    narrow(up, shape.qk_nope_head_dim, nope.row(int(at)));
    rotate(up + shape.qk_nope_head_dim, rotation, shape.qk_rope_head_dim,
           out.query.row(int(at)) + shape.kv_lora_rank);
  }
  for (int h = 0; h < shape.index_n_heads; ++h, up += shape.index_head_dim) {
    uint16_t* index = out.index.row(row * shape.index_n_heads + h);
    rotate(up, rotation, shape.qk_rope_head_dim, index);
    narrow(up + shape.qk_rope_head_dim, shape.index_head_dim - shape.qk_rope_head_dim,
           index + shape.qk_rope_head_dim);
  }
}

// Rows [begin, begin + rows) of `low` -> their queries, taken from the shared arena.
template <class G>
QueryRows project_queries(const Threads& threads, const AttentionCall& call, int begin,
                          int rows, const LowRows& low) {
  const AttentionShape& shape = call.layer.shape;
  int heads = shape.num_attention_heads;
  QueryRows out = {
      take_rows(threads.shared, rows * heads, shape.key_dim()),
      take_rows(threads.shared, rows * shape.index_n_heads, shape.index_head_dim)};
  Arena::Mark mark = threads.shared->mark();
  Rows nope = take_rows(threads.shared, rows * heads, shape.qk_nope_head_dim);
  size_t n = call.layer.up.n;
  float* up = take_floats(threads.shared, rows * n);
  run_gemm<G>(threads, {low.query.row(begin), low.query.stride, rows, call.layer.up,
                        Out::kFloat, up, n});
  for_rows(threads, rows, n * 8, [&](Range range, Arena*) {
    for (int r = range.begin; r < range.end; ++r)
      split_up(shape, up + r * n,
               call.rotations + size_t(begin + r) * shape.qk_rope_head_dim, r, nope,
               out);
  });
  run_heads<G>(threads, heads, [&](int head) -> Gemm {
    return {nope.row(head),          nope.stride * heads, rows,
            call.layer.key_up[head], Out::kBf16,          out.query.row(head),
            out.query.stride * heads};
  });
  threads.shared->release(mark);
  return out;
}

// Latent outputs [rows * heads][kv_lora_rank] of rows from `begin` on -> residual,
// normed.
template <class G>
void project_output(const Threads& threads, const AttentionCall& call, int begin,
                    int rows, const Rows& latent) {
  const AttentionShape& shape = call.layer.shape;
  int heads = shape.num_attention_heads;
  Arena::Mark mark = threads.shared->mark();
  Rows values = take_rows(threads.shared, rows, heads * shape.v_head_dim);
  run_heads<G>(threads, heads, [&](int head) -> Gemm {
    return {latent.row(head),
            latent.stride * heads,
            rows,
            call.layer.value_up[head],
            Out::kBf16,
            values.data + head * shape.v_head_dim,
            values.stride};
  });
  size_t at = size_t(begin) * shape.hidden_size;
  run_gemm<G>(threads, {values.data, values.stride, rows, call.layer.out,
                        Out::kResidual, call.residual + at, size_t(shape.hidden_size),
                        call.hidden + at, size_t(shape.hidden_size)});
  norm_rows(threads,
            {call.layer.output_norm, rows, shape.hidden_size, call.residual + at,
             call.normed + at},
            shape.hidden_size);
  threads.shared->release(mark);
}

}  // namespace
}  // namespace host
}  // namespace duck
