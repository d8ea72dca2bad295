// What the kernels of one instruction set offer: whole pieces of a layer.
#pragma once

#include "host/gemm/packed.h"
#include "host/gemm/threads.h"
#include "host/kernels/step.h"

namespace duck {
namespace host {

struct NormView {
  const float* weight;
  float eps;
};

struct NormCall {
  NormView norm;
  int rows, size;
  const uint16_t* x;
  uint16_t* out;
};

struct LinearCall {
  PackedView weight;
  int rows;
  const uint16_t* x;  // [rows][k] bf16
  bool is_bf16;
  void* out;  // [rows][n] bf16 or fp32
};

struct MlpCall {
  PackedView gate_up;  // from pack_gate_up
  PackedView down;
  int columns;
  int rows;
  const uint16_t* x;         // [rows][k] bf16
  const uint16_t* residual;  // [rows][n] bf16, or null
  uint16_t* out_bf16;        // residual + mlp(x), or
  float* out_float;          // mlp(x)
};

struct RouterShape {
  int hidden_size, n_routed_experts, num_experts_per_tok, n_group, topk_group;
  bool norm_topk_prob;
  float routed_scaling_factor;
};

constexpr int kMaxRouterParts = 3;

// The fp32 router weight is the sum of its parts.
struct RouterCall {
  RouterShape shape;
  PackedView parts[kMaxRouterParts];
  int num_parts;
  const float* bias;
  int rows;
  const uint16_t* x;  // [rows][hidden] bf16
  int32_t* ids;       // [rows][topk], best first
  float* weights;     // [rows][topk]
};

struct AddCall {
  size_t size;
  const uint16_t* residual;
  const float* shared;
  const float* routed;
  uint16_t* out;  // residual + (shared + routed)
};

// A layer without an indexer has index_n_heads and index_head_dim 0.
struct AttentionShape {
  int hidden_size, num_attention_heads, q_lora_rank, kv_lora_rank;
  int qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
  int index_n_heads, index_head_dim, index_topk;
  bool is_fp8;
  float scale, index_scale;

  int qk_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int key_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  bool has_indexer() const { return index_n_heads > 0; }
};

struct AttentionView {
  AttentionShape shape;
  NormView input_norm, q_norm, kv_norm, output_norm;
  NormView index_norm;
  const float* index_bias;
  PackedView down;  // hidden -> q_lora_rank, key_dim, index_head_dim, index_n_heads
  PackedView up;    // q_lora_rank -> heads * qk_dim, index_n_heads * index_head_dim
  const PackedView* key_up;    // of each head: qk_nope_head_dim -> kv_lora_rank
  const PackedView* value_up;  // of each head: kv_lora_rank -> v_head_dim
  PackedView out;              // heads * v_head_dim -> hidden
};

// hidden + attention(input_norm(hidden)), and output_norm of that.
struct AttentionCall {
  AttentionView layer;
  StepView step;
  int rows;                // step.num_rows, and then padding
  const uint16_t* hidden;  // [rows][hidden] bf16
  const float* rotations;  // [rows][qk_rope_head_dim]: cos, sin, cos, sin, ...
  uint8_t* latent_cache;   // [slots][bytes]
  uint8_t* index_cache;    // null without an indexer
  // [rows][index_topk] positions in rising order, of rows that see more than these: of
  // another layer's choice if is_chosen; else out, or null.
  int32_t* chosen;
  bool is_chosen;
  uint16_t* residual;  // out, [rows][hidden] bf16
  uint16_t* normed;    // out, [rows][hidden] bf16
};

struct HostKernels {
  const char* name;
  void (*norm)(const Threads&, const NormCall&);
  void (*linear)(const Threads&, const LinearCall&);
  void (*mlp)(const Threads&, const MlpCall&);
  void (*route)(const Threads&, const RouterCall&);
  void (*add)(const Threads&, const AddCall&);
  void (*attend)(const Threads&, const AttentionCall&);
};

const HostKernels* portable_kernels();
// Null when this build or this CPU has no such instructions.
const HostKernels* avx2_kernels();
const HostKernels* avx512_kernels();
const HostKernels* amx_kernels();

}  // namespace host
}  // namespace duck
