// What the C++ host makes of one row's projections, by its own headers.
#include "host/kernels/project.h"
#include "host/kernels/router.h"

extern "C" {

// down [q + latent + rope + dim + heads] -> both caches' rows, low query [q] bf16 and
// index weights [heads].
void split_down(const int* sizes, const float* down, const float* rotation,
                const float* const* norms, float eps, float index_eps,
                float index_scale, uint8_t* latent_row, uint8_t* index_row,
                uint16_t* low_query, float* index_weights) {
  using namespace duck::host;
  int q = sizes[0], latent = sizes[1], rope = sizes[2], dim = sizes[3];
  AttentionCall call = {};
  AttentionShape& shape = call.layer.shape;
  shape.q_lora_rank = q;
  shape.kv_lora_rank = latent;
  shape.qk_rope_head_dim = rope;
  shape.index_head_dim = dim;
  shape.index_n_heads = sizes[4];
  shape.is_fp8 = true;
  shape.index_scale = index_scale;
  call.layer.q_norm = {norms[0], eps};
  call.layer.kv_norm = {norms[1], eps};
  call.layer.index_norm = {norms[2], index_eps};
  call.layer.index_bias = norms[3];
  int64_t slot = 0;
  call.step.num_rows = 1;
  call.step.slots = &slot;
  call.rotations = rotation;
  call.latent_cache = latent_row;
  call.index_cache = index_row;
  float scratch[4096];
  split_down(call, down, 0, scratch, {{low_query, size_t(q)}, index_weights});
}

// logits [experts] -> ids and weights [topk].
void choose(const int* sizes, float factor, const float* bias, const float* logits,
            int32_t* ids, float* weights) {
  duck::host::RouterShape shape = {0,        sizes[0], sizes[1], sizes[2],
                                   sizes[3], sizes[4], factor};
  float scratch[4096];
  duck::host::choose_experts(shape, bias, logits, scratch, ids, weights);
}

}  // extern "C"
