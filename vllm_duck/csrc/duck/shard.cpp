#include "duck/shard.h"

#include <cstdio>
#include <exception>
#include <new>

namespace duck {

ForwardStatus Shard::forward(void* context, const ForwardCall& call, char* error,
                             size_t error_bytes) {
  auto* self = static_cast<Shard*>(context);
  try {
    std::string problem = self->misfit(call);
    if (!problem.empty()) {
      std::snprintf(error, error_bytes, "%s", problem.c_str());
      return ForwardStatus::kInvalidRequest;
    }
    self->engine_->forward({call, self->layers_.at(call.layer_idx), self->expert_lo_});
  } catch (const std::bad_alloc&) {
    std::snprintf(error, error_bytes, "the duck has no memory for the request");
    return ForwardStatus::kInternal;
  } catch (const std::exception& failure) {
    std::snprintf(error, error_bytes, "the kernel failed: %s", failure.what());
    return ForwardStatus::kInternal;
  }
  return ForwardStatus::kOk;
}

std::string Shard::misfit(const ForwardCall& call) const {
  auto found = layers_.find(call.layer_idx);
  if (found == layers_.end())
    return "layer_idx must be one of the " + std::to_string(layers_.size()) +
           " layers that Describe lists, got " + std::to_string(call.layer_idx);
  int hidden_size = found->second->shape().hidden_size;
  if (call.hidden_size != uint32_t(hidden_size))
    return "hidden must have size " + std::to_string(hidden_size) + " on axis 1, got " +
           std::to_string(call.hidden_size);
  return duck::misfit(call, n_routed_experts_);
}

}  // namespace duck
