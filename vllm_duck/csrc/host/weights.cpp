#include "host/weights.h"

#include <algorithm>

#include "simd/bf16.h"

namespace duck {
namespace host {

PackedMatrix pack_rows(const uint16_t* data, int n, int k) {
  PackedMatrix packed(n, k);
  packed.pack({data, size_t(k), 1});
  return packed;
}

Norm copy_norm(const float* weight, int size, float eps) {
  return {std::vector<float>(weight, weight + size), eps};
}

namespace {

std::vector<PackedView> views(const std::vector<PackedMatrix>& matrices) {
  std::vector<PackedView> found;
  for (auto& matrix : matrices) found.push_back(matrix.view());
  return found;
}

}  // namespace

// An fp32 number is a sum of three bf16 at most; a checkpoint's router is bf16, and
// then one part is all there is.
Router::Router(const RouterShape& shape, const float* weight, const float* bias)
    : shape_(shape), bias_(bias, bias + shape.n_routed_experts) {
  std::vector<float> rest(weight,
                          weight + size_t(shape.n_routed_experts) * shape.hidden_size);
  std::vector<uint16_t> part(rest.size());
  auto is_zero = [](float value) { return value == 0.0f; };
  do {
    for (size_t i = 0; i < rest.size(); ++i) {
      part[i] = bf16_from_float(rest[i]);
      rest[i] -= bf16_to_float(part[i]);
    }
    parts_.push_back(pack_rows(part.data(), shape.n_routed_experts, shape.hidden_size));
  } while (parts_.size() < kMaxRouterParts &&
           !std::all_of(rest.begin(), rest.end(), is_zero));
}

RouterCall Router::call() const {
  RouterCall call = {};
  call.shape = shape_;
  call.num_parts = int(parts_.size());
  for (size_t i = 0; i < parts_.size(); ++i) call.parts[i] = parts_[i].view();
  call.bias = bias_.data();
  return call;
}

Attention::Attention(const AttentionShape& shape, float eps, float index_eps,
                     const Weights& weights)
    : shape_(shape),
      input_norm_(copy_norm(weights.input_norm, shape.hidden_size, eps)),
      q_norm_(copy_norm(weights.q_norm, shape.q_lora_rank, eps)),
      kv_norm_(copy_norm(weights.kv_norm, shape.kv_lora_rank, eps)),
      output_norm_(copy_norm(weights.output_norm, shape.hidden_size, eps)),
      index_norm_(copy_norm(weights.index_norm, shape.index_head_dim, index_eps)),
      index_bias_(weights.index_bias, weights.index_bias + shape.index_head_dim),
      down_(pack_rows(weights.down,
                      shape.q_lora_rank + shape.key_dim() + shape.index_head_dim +
                          shape.index_n_heads,
                      shape.hidden_size)),
      up_(pack_rows(weights.up,
                    shape.num_attention_heads * shape.qk_dim() +
                        shape.index_n_heads * shape.index_head_dim,
                    shape.q_lora_rank)),
      out_(pack_rows(weights.out, shape.hidden_size,
                     shape.num_attention_heads * shape.v_head_dim)) {
  size_t latent = shape.kv_lora_rank;
  for (int head = 0; head < shape.num_attention_heads; ++head) {
    // kv_b_proj of a head: qk_nope_head_dim rows of keys, then v_head_dim rows of
    // values.
    const uint16_t* keys =
        weights.kv_b +
        size_t(head) * (shape.qk_nope_head_dim + shape.v_head_dim) * latent;
    key_up_.emplace_back(shape.kv_lora_rank, shape.qk_nope_head_dim);
    key_up_.back().pack({keys, 1, latent});
    value_up_.push_back(pack_rows(keys + shape.qk_nope_head_dim * latent,
                                  shape.v_head_dim, shape.kv_lora_rank));
  }
  key_up_views_ = views(key_up_);
  value_up_views_ = views(value_up_);
}

AttentionView Attention::view() const {
  return {shape_,
          input_norm_.view(),
          q_norm_.view(),
          kv_norm_.view(),
          output_norm_.view(),
          index_norm_.view(),
          index_bias_.data(),
          down_.view(),
          up_.view(),
          key_up_views_.data(),
          value_up_views_.data(),
          out_.view()};
}

}  // namespace host
}  // namespace duck
