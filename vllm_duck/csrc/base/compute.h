// How a stream server asks for a partial sum: plain functions that one extension hands
// to the other in a PyCapsule, so that no Python runs in between.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {

struct ForwardCall {
  uint32_t layer_idx;
  uint32_t num_rows;
  uint32_t hidden_size;
  uint32_t num_topk;
  const uint16_t* hidden;     // [T][H] bf16
  const int32_t* topk_ids;    // [T][A]
  const float* topk_weights;  // [T][A]
  float* out_fp32;            // [T][H]: this one,
  uint16_t* out_bf16;         // or this one
  // Between two units of its work, it lets calls that came meanwhile go first.
  bool gives_way;
};

// The numbers of `Status` in duck.proto.
enum class ForwardStatus : int { kOk = 1, kInvalidRequest = 2, kInternal = 3 };

struct Compute {
  void* context;
  // Writes out, or a sentence of at most `error_bytes` (its zero included) that says
  // why not. Called from any thread; of two calls at once, one gives way.
  ForwardStatus (*forward)(void* context, const ForwardCall& call, char* error,
                           size_t error_bytes);
};

constexpr const char* kComputeName = "vllm_duck.Compute";

}  // namespace duck
