#include "duck/shard.h"

#include <cstdio>
#include <exception>
#include <new>

namespace duck {

ForwardStatus Shard::forward(void* context, const ForwardCall& call, char* error,
                             size_t error_bytes) {
  auto* self = static_cast<Shard*>(context);
  if (!self->fits(call, error, error_bytes)) return ForwardStatus::kInvalidRequest;
  try {
    self->engine_->forward({self->layers_.at(call.layer_idx), call.hidden,
                            call.topk_ids, call.topk_weights, int(call.num_rows),
                            int(call.num_topk), self->expert_lo_, call.out_fp32,
                            call.out_bf16});
  } catch (const std::bad_alloc&) {
    std::snprintf(error, error_bytes, "the duck has no memory for the request");
    return ForwardStatus::kInternal;
  } catch (const std::exception& failure) {
    std::snprintf(error, error_bytes, "the kernel failed: %s", failure.what());
    return ForwardStatus::kInternal;
  }
  return ForwardStatus::kOk;
}

bool Shard::fits(const ForwardCall& call, char* error, size_t error_bytes) const {
  auto found = layers_.find(call.layer_idx);
  if (found == layers_.end()) {
    std::snprintf(error, error_bytes,
                  "layer_idx must be one of the %zu layers that Describe lists, got %u",
                  layers_.size(), call.layer_idx);
    return false;
  }
  int hidden = found->second->shape().hidden;
  if (call.hidden_size != uint32_t(hidden)) {
    std::snprintf(error, error_bytes, "hidden must have size %d on axis 1, got %u",
                  hidden, call.hidden_size);
    return false;
  }
  if (call.num_topk == 0 || call.num_rows > (1u << 24) / call.num_topk) {
    std::snprintf(error, error_bytes,
                  "topk_ids must have 1 to 2^24 entries, got %u x %u", call.num_rows,
                  call.num_topk);
    return false;
  }
  size_t num_ids = size_t(call.num_rows) * call.num_topk;
  for (size_t i = 0; i < num_ids; ++i)
    if (uint32_t(call.topk_ids[i]) >= uint32_t(n_routed_experts_)) {
      std::snprintf(
          error, error_bytes,
          "topk_ids must be in [0, %d), got %d in row %zu; the router and the "
          "duck disagree about n_routed_experts",
          n_routed_experts_, int(call.topk_ids[i]), i / call.num_topk);
      return false;
    }
  return true;
}

}  // namespace duck
