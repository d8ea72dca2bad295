// The whole attention block of a layer, panel of rows by panel.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/sparse.h"

namespace duck {
namespace host {
namespace {

// Rows that go through the block together: bounds its scratch.
constexpr int kPanelRows = 256;

template <class G>
void attend_panel(const Threads& threads, const AttentionCall& call, int begin,
                  int rows, const LowRows& low) {
  const AttentionShape& shape = call.layer.shape;
  Arena::Mark mark = threads.shared->mark();
  QueryRows queries = project_queries<G>(threads, call, begin, rows, low);
  Rows latent =
      take_rows(threads.shared, rows * shape.num_attention_heads, shape.kv_lora_rank);
  Panel panel = {&call, begin, queries,
                 low.index_weight + size_t(begin) * shape.index_n_heads, latent};
  int real_rows = max_int(0, min_int(rows, call.step.num_rows - begin));
  attend_rows<G>(threads, panel, 0, real_rows);
  // Padding attends to nothing.
  for (int r = real_rows * shape.num_attention_heads;
       r < rows * shape.num_attention_heads; ++r)
    std::memset(latent.row(r), 0, sizeof(uint16_t) * latent.stride);
  project_output<G>(threads, call, begin, rows, latent);
  threads.shared->release(mark);
}

template <class G>
void attend_call(const Threads& threads, const AttentionCall& call) {
  const AttentionShape& shape = call.layer.shape;
  LowRows low = {take_rows(threads.shared, call.rows, shape.q_lora_rank),
                 take_floats(threads.shared, size_t(call.rows) * shape.index_n_heads)};
  // All keys before any query: a row may see keys of any row before it, and of another
  // request's row that shares a block.
  for (int begin = 0; begin < call.rows; begin += kPanelRows)
    project_keys<G>(threads, call, begin, min_int(kPanelRows, call.rows - begin), low);
  for (int begin = 0; begin < call.rows; begin += kPanelRows)
    attend_panel<G>(threads, call, begin, min_int(kPanelRows, call.rows - begin), low);
}

}  // namespace
}  // namespace host
}  // namespace duck
