#include "host/weights.h"

#include <algorithm>
#include <utility>

#include "simd/bf16.h"

namespace duck {
namespace host {

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
Router::Router(Pool* pool, const RouterShape& shape, const float* weight,
               const float* bias)
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
    Part rows =
        rows_part(part.data(), nullptr, shape.n_routed_experts, shape.hidden_size);
    parts_.emplace_back(pool, std::vector<Part>{rows}, shape.hidden_size);
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

namespace {

// kv_b_proj [heads * (qk_nope_head_dim + v_head_dim)][kv_lora_rank], from `row` on.
Part rows_from(const Part& kv_b, int row, int latent) {
  Part part = kv_b;
  size_t size = kv_b.scales ? sizeof(uint8_t) : sizeof(uint16_t);
  part.weight = static_cast<const uint8_t*>(kv_b.weight) + row * latent * size;
  if (kv_b.scales) part.scales = kv_b.scales + row / kScaleBlock * kv_b.scale_n_stride;
  return part;
}

// Its rows of keys, transposed: qk_nope_head_dim -> kv_lora_rank.
Part key_part(const Part& kv_b, int row, int latent) {
  Part part = rows_from(kv_b, row, latent);
  part.n = latent;
  std::swap(part.n_stride, part.k_stride);
  std::swap(part.scale_n_stride, part.scale_k_stride);
  return part;
}

// Its rows of values: kv_lora_rank -> v_head_dim.
Part value_part(const Part& kv_b, int row, int latent, int v_head_dim) {
  Part part = rows_from(kv_b, row, latent);
  part.n = v_head_dim;
  part.n_offset = row % kScaleBlock;
  return part;
}

}  // namespace

Attention::Attention(Pool* pool, const AttentionShape& shape, float eps,
                     float index_eps, const Weights& weights)
    : shape_(shape),
      input_norm_(copy_norm(weights.input_norm, shape.hidden_size, eps)),
      q_norm_(copy_norm(weights.q_norm, shape.q_lora_rank, eps)),
      kv_norm_(copy_norm(weights.kv_norm, shape.kv_lora_rank, eps)),
      output_norm_(copy_norm(weights.output_norm, shape.hidden_size, eps)),
      index_norm_(copy_norm(weights.index_norm, shape.index_head_dim, index_eps)),
      index_bias_(weights.index_bias, weights.index_bias + shape.index_head_dim),
      down_(pool, weights.down, shape.hidden_size),
      up_(pool, weights.up, shape.q_lora_rank),
      out_(pool, weights.out, shape.num_attention_heads * shape.v_head_dim) {
  int latent = shape.kv_lora_rank, row = 0;
  const Part& kv_b = weights.kv_b.at(0);
  for (int head = 0; head < shape.num_attention_heads; ++head) {
    std::vector<Part> keys = {key_part(kv_b, row, latent)};
    key_up_.emplace_back(pool, keys, shape.qk_nope_head_dim, row % kScaleBlock);
    row += shape.qk_nope_head_dim;
    std::vector<Part> values = {value_part(kv_b, row, latent, shape.v_head_dim)};
    value_up_.emplace_back(pool, values, latent);
    row += shape.v_head_dim;
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
