// The weights of one module, packed: what a capsule in Python holds.
#pragma once

#include <vector>

#include "host/kernels/kernels.h"

namespace duck {
namespace host {

struct Norm {
  std::vector<float> weight;
  float eps;

  NormView view() const { return {weight.data(), eps}; }
};

Norm copy_norm(const float* weight, int size, float eps);

struct Linear {
  PackedMatrix weight;
};

struct Mlp {
  PackedMatrix gate_up;
  PackedMatrix down;
  int columns;
};

class Router {
 public:
  // weight [num_experts][hidden] fp32, bias [num_experts].
  Router(Pool* pool, const RouterShape& shape, const float* weight, const float* bias);

  RouterCall call() const;

 private:
  RouterShape shape_;
  std::vector<PackedMatrix> parts_;
  std::vector<float> bias_;
};

class Attention {
 public:
  // Norms are fp32.
  struct Weights {
    std::vector<Part> down, up, kv_b, out;  // kv_b is one part
    const float *input_norm, *q_norm, *kv_norm, *output_norm, *index_norm, *index_bias;
  };
  Attention(Pool* pool, const AttentionShape& shape, float eps, float index_eps,
            const Weights& weights);

  AttentionView view() const;

 private:
  AttentionShape shape_;
  Norm input_norm_, q_norm_, kv_norm_, output_norm_, index_norm_;
  std::vector<float> index_bias_;
  PackedMatrix down_, up_, out_;
  std::vector<PackedMatrix> key_up_, value_up_;
  std::vector<PackedView> key_up_views_, value_up_views_;
};

}  // namespace host
}  // namespace duck
