// What the host's layers hold, to Python: packed weights, and the tokens of a step.
#include "host/host_module.h"

namespace duck::host {
namespace {

using namespace duck::binding;

PyObject* step_new(Arguments& args) {
  int num_requests = args.integer("num_requests");
  int block_size = args.integer("block_size");
  auto* row_begin = args.memory<int32_t>("row_begin");
  auto* first_visible = args.memory<int32_t>("first_visible");
  auto* slots = args.memory<int64_t>("slots");
  auto* table = args.memory<int32_t>("table");
  int table_stride = args.integer("table_stride");
  if (!args.done()) return nullptr;
  return to_capsule(std::make_unique<Step>(num_requests, block_size, row_begin,
                                           first_visible, slots, table, table_stride));
}

PyObject* norm_new(Arguments& args) {
  auto* weight = args.memory<float>("weight");
  int size = args.integer("size");
  auto eps = float(args.real("eps"));
  if (!args.done()) return nullptr;
  return to_capsule(std::make_unique<Norm>(copy_norm(weight, size, eps)));
}

// Their number, then for each: the address of its rows, that of its scales or 0, rows.
std::vector<Part> parts(Arguments& args, const char* name, int k) {
  auto* numbers = args.memory<int64_t>(name);
  std::vector<Part> found;
  if (!numbers) return found;
  for (int64_t i = 0; i < numbers[0]; ++i) {
    const int64_t* at = numbers + 1 + 3 * i;
    found.push_back(rows_part(reinterpret_cast<const void*>(at[0]),
                              reinterpret_cast<const float*>(at[1]), int(at[2]), k));
  }
  return found;
}

// make(pool): what is packed there.
template <class Make>
PyObject* packed(Arguments& args, Host* host, const Make& make) {
  if (!args.done()) return nullptr;
  decltype(host->pack(make)) made;
  {
    WithoutGil released;
    made = host->pack(make);
  }
  return to_capsule(std::move(made));
}

PyObject* linear_new(Arguments& args) {
  auto* host = args.held<Host>("host");
  int k = args.integer("k");
  auto weight = parts(args, "weight", k);
  return packed(args, host, [&](Pool* pool) {
    return std::make_unique<Linear>(Linear{PackedMatrix(pool, weight, k)});
  });
}

PyObject* mlp_new(Arguments& args) {
  auto* host = args.held<Host>("host");
  int hidden_size = args.integer("hidden_size");
  int columns = args.integer("columns");
  auto gate = parts(args, "gate", hidden_size);
  auto up = parts(args, "up", hidden_size);
  auto down = parts(args, "down", columns);
  return packed(args, host, [&](Pool* pool) {
    return std::make_unique<Mlp>(
        Mlp{pack_gate_up(pool, gate.at(0), up.at(0), hidden_size),
            PackedMatrix(pool, down, columns), columns});
  });
}

PyObject* router_new(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* weight = args.memory<float>("weight");
  auto* bias = args.memory<float>("bias");
  RouterShape shape;
  shape.hidden_size = args.integer("hidden_size");
  shape.n_routed_experts = args.integer("n_routed_experts");
  shape.num_experts_per_tok = args.integer("num_experts_per_tok");
  shape.n_group = args.integer("n_group");
  shape.topk_group = args.integer("topk_group");
  shape.norm_topk_prob = args.truth("norm_topk_prob");
  shape.routed_scaling_factor = float(args.real("routed_scaling_factor"));
  return packed(args, host, [&](Pool* pool) {
    return std::make_unique<Router>(pool, shape, weight, bias);
  });
}

PyObject* attention_new(Arguments& args) {
  auto* host = args.held<Host>("host");
  AttentionShape shape;
  shape.hidden_size = args.integer("hidden_size");
  shape.num_attention_heads = args.integer("num_attention_heads");
  shape.q_lora_rank = args.integer("q_lora_rank");
  shape.kv_lora_rank = args.integer("kv_lora_rank");
  shape.qk_nope_head_dim = args.integer("qk_nope_head_dim");
  shape.qk_rope_head_dim = args.integer("qk_rope_head_dim");
  shape.v_head_dim = args.integer("v_head_dim");
  shape.index_n_heads = args.integer("index_n_heads");
  shape.index_head_dim = args.integer("index_head_dim");
  shape.index_topk = args.integer("index_topk");
  shape.is_fp8 = args.truth("is_fp8");
  shape.scale = float(args.real("scale"));
  shape.index_scale = float(args.real("index_scale"));
  auto eps = float(args.real("eps")), index_eps = float(args.real("index_eps"));
  Attention::Weights weights;
  weights.down = parts(args, "down", shape.hidden_size);
  weights.up = parts(args, "up", shape.q_lora_rank);
  weights.kv_b = parts(args, "kv_b", shape.kv_lora_rank);
  weights.out = parts(args, "out", shape.num_attention_heads * shape.v_head_dim);
  weights.input_norm = args.memory<float>("input_norm");
  weights.q_norm = args.memory<float>("q_norm");
  weights.kv_norm = args.memory<float>("kv_norm");
  weights.output_norm = args.memory<float>("output_norm");
  weights.index_norm = args.memory<float>("index_norm");
  weights.index_bias = args.memory<float>("index_bias");
  return packed(args, host, [&](Pool* pool) {
    return std::make_unique<Attention>(pool, shape, eps, index_eps, weights);
  });
}

}  // namespace

std::vector<PyMethodDef> weight_functions() {
  return {
      method<step_new>("step_new"),     method<norm_new>("norm_new"),
      method<linear_new>("linear_new"), method<mlp_new>("mlp_new"),
      method<router_new>("router_new"), method<attention_new>("attention_new"),
  };
}

}  // namespace duck::host
