// Chooses each token's experts: sigmoid scores, grouped top-k, normalised weights.
// Source: DeepSeek-V3 report, 2.1.2 and 3.2.2; inference/model.py::Gate.
// Of equal scores the lower id wins.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/dense.h"

namespace duck {
namespace host {
namespace {

constexpr float kNever = -__builtin_inff();

inline int best_of(const float* scores, int n) {
  int best = 0;
  for (int i = 1; i < n; ++i)
    if (scores[i] > scores[best]) best = i;
  return best;
}

// The sum of the two best.
inline float score_group(const float* scores, int n) {
  float first = kNever, second = kNever;
  for (int i = 0; i < n; ++i) {
    float score = scores[i];
    second = score > first ? first : score > second ? score : second;
    first = score > first ? score : first;
  }
  return n > 1 ? first + second : first;
}

// Groups that are not among the best get kNever. `group_scores` has room for them all.
inline void mask_groups(const RouterShape& shape, float* biased, float* group_scores) {
  int size = shape.n_routed_experts / shape.n_group;
  for (int g = 0; g < shape.n_group; ++g)
    group_scores[g] = score_group(biased + g * size, size);
  for (int taken = 0; taken < shape.topk_group; ++taken)
    group_scores[best_of(group_scores, shape.n_group)] = kNever;
  for (int g = 0; g < shape.n_group; ++g)
    if (group_scores[g] != kNever)
      for (int i = 0; i < size; ++i) biased[g * size + i] = kNever;
}

// logits [num_experts] -> one row of ids and weights. `scratch` is 3 * num_experts.
inline void choose_experts(const RouterShape& shape, const float* bias,
                           const float* logits, float* scratch, int32_t* ids,
                           float* weights) {
  int n = shape.n_routed_experts;
  float *scores = scratch, *biased = scratch + n, *group_scores = scratch + 2 * n;
  for (int i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + exp_clamped(-logits[i]));
  for (int i = 0; i < n; ++i) biased[i] = scores[i] + bias[i];
  if (shape.topk_group < shape.n_group) mask_groups(shape, biased, group_scores);
  float total = 0;
  for (int k = 0; k < shape.num_experts_per_tok; ++k) {
    ids[k] = best_of(biased, n);
    biased[ids[k]] = kNever;
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  float divisor = shape.norm_topk_prob ? total + 1e-20f : 1.0f;
  for (int k = 0; k < shape.num_experts_per_tok; ++k)
    weights[k] = weights[k] / divisor * shape.routed_scaling_factor;
}

// Rows [begin, begin + rows).
template <class G>
void route_rows(const Threads& threads, const RouterCall& call, int begin, int rows) {
  const RouterShape& shape = call.shape;
  size_t n = shape.n_routed_experts, size = rows * n;
  Arena::Mark mark = threads.shared->mark();
  Rows x = copy_rows(threads.shared, call.x + size_t(begin) * shape.hidden_size, rows,
                     shape.hidden_size);
  float* logits = take_floats(threads.shared, size * call.num_parts);
  for (int part = 0; part < call.num_parts; ++part)
    run_gemm<G>(threads, {x.data, x.stride, rows, call.parts[part], Out::kFloat,
                          logits + part * size, n});
  for_rows(threads, rows, n * 64, [&](Range range, Arena* arena) {
    Arena::Mark mine = arena->mark();
    float* scratch = take_floats(arena, 3 * n);
    for (int r = range.begin; r < range.end; ++r) {
      float* row = logits + r * n;
      // The smallest part first.
      for (int part = call.num_parts - 1; part > 0; --part)
        for (size_t i = 0; i < n; ++i)
          row[(part - 1) * size + i] += row[part * size + i];
      size_t at = size_t(begin + r) * shape.num_experts_per_tok;
      choose_experts(shape, call.bias, row, scratch, call.ids + at, call.weights + at);
    }
    arena->release(mine);
  });
  threads.shared->release(mark);
}

template <class G>
void route_call(const Threads& threads, const RouterCall& call) {
  for (int begin = 0; begin < call.rows; begin += kDenseRows)
    route_rows<G>(threads, call, begin, min_int(kDenseRows, call.rows - begin));
}

}  // namespace
}  // namespace host
}  // namespace duck
