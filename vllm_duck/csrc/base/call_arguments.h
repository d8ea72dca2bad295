// A request to a duck from Python's arguments.
#pragma once

#include "base/arguments.h"
#include "base/compute.h"

namespace duck::binding {

// `call` points into the arrays, which are held as long as this lives.
struct CallArguments {
  explicit CallArguments(Arguments& args) {
    call.layer_idx = args.u32("layer_idx");
    call.num_rows = args.u32("num_rows");
    call.hidden_size = args.u32("hidden_size");
    call.num_topk = args.u32("num_topk");
    size_t topk_bytes = size_t(call.num_rows) * call.num_topk * 4;
    args.bytes("hidden", &hidden, size_t(call.num_rows) * call.hidden_size * 2);
    args.bytes("topk_ids", &ids, topk_bytes);
    args.bytes("topk_weights", &weights, topk_bytes);
    call.hidden = hidden.data<uint16_t>();
    call.topk_ids = ids.data<int32_t>();
    call.topk_weights = weights.data<float>();
  }

  ForwardCall call = {};
  BytesView hidden, ids, weights;
};

}  // namespace duck::binding
