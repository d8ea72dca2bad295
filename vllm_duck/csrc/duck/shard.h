// The layers of one shard with the engine that computes them: a stream server's
// Compute.
#pragma once

#include <unordered_map>

#include "base/compute.h"
#include "duck/engine.h"

namespace duck {

class Shard {
 public:
  // Neither the engine nor the layers are owned.
  Shard(Engine* engine, int expert_lo, int n_routed_experts)
      : engine_(engine), expert_lo_(expert_lo), n_routed_experts_(n_routed_experts) {}

  void add(uint32_t layer_idx, const Layer* layer) { layers_[layer_idx] = layer; }

  // A Compute's `forward`; `context` is a Shard.
  static ForwardStatus forward(void* context, const ForwardCall& call, char* error,
                               size_t error_bytes);

 private:
  std::string misfit(const ForwardCall& call) const;

  Engine* engine_;
  int expert_lo_;
  int n_routed_experts_;
  std::unordered_map<uint32_t, const Layer*> layers_;
};

}  // namespace duck
