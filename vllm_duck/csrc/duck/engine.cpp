#include "duck/engine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "simd/bf16.h"

namespace duck {
namespace {

// Longer calls are cut: a row's bits do not depend on its neighbours, and scratch
// stays bounded.
constexpr int kMaxRows = 2048;

// Below this many bytes of weights a call costs less than waking another thread.
constexpr size_t kBytesPerWorker = 256 << 10;

// Tiles of activations are read whole, past the last row.
constexpr int kSpareRows = 16;

// From this many rows for each expert on, a unit of the gate/up phase is a whole run of
// column groups, which share one copy of the activations.
constexpr int kManyRows = 8;
constexpr int kManyGroups = 4;

// Hidden groups (of 16) that one unit of the down phase covers: half of a worker's
// share at 8 workers and hidden 7168, or as many as keep the sums in an L2 cache.
constexpr int kDownChunk = 32;
constexpr size_t kSumBytes = 512 << 10;

int down_chunk(uint32_t num_rows) {
  size_t fitting = kSumBytes / (size_t(num_rows) * kGroup * sizeof(float));
  return int(std::clamp<size_t>(fitting / 4 * 4, 4, kDownChunk));
}

// Inside an engine's gate, for a scope.
class Inside {
 public:
  Inside(Gate* gate, bool gives_way) : gate_(gate), gives_way_(gives_way) {
    gate->enter(gives_way);
  }
  ~Inside() { gate_->leave(gives_way_); }
  Inside(const Inside&) = delete;

 private:
  Gate* gate_;
  bool gives_way_;
};

// Fills memory->active with the rows of each expert of the shard; returns the number of
// pairs.
int plan(const LayerCall& call, CallMemory* memory) {
  int num_experts = call.layer->shape().num_experts;
  int num_ids = call.num_rows * call.num_topk;
  auto& begins = memory->expert_begin;
  begins.assign(num_experts + 1, 0);
  for (int i = 0; i < num_ids; ++i) {
    unsigned local = unsigned(call.topk_ids[i] - call.expert_lo);
    if (local < unsigned(num_experts)) ++begins[local + 1];
  }
  for (int e = 0; e < num_experts; ++e) begins[e + 1] += begins[e];
  int num_pairs = begins[num_experts];
  memory->pair_tokens.resize(num_pairs);
  memory->pair_weights.resize(num_pairs);
  memory->active.clear();
  memory->max_rows = 0;
  for (int e = 0; e < num_experts; ++e) {
    int begin = begins[e], count = begins[e + 1] - begin;
    if (count == 0) continue;
    memory->max_rows = std::max(memory->max_rows, count);
    memory->active.push_back({call.layer->expert(e), count,
                              memory->pair_tokens.data() + begin,
                              memory->pair_weights.data() + begin, nullptr});
  }
  for (int i = 0; i < num_ids; ++i) {
    unsigned local = unsigned(call.topk_ids[i] - call.expert_lo);
    if (local >= unsigned(num_experts)) continue;
    int at = begins[local]++;
    memory->pair_tokens[at] = i / call.num_topk;
    memory->pair_weights[at] = call.topk_weights[i];
  }
  return num_pairs;
}

void write_out(const LayerCall& call, const float* y, int first_column,
               int num_columns) {
  size_t hidden = call.layer->shape().hidden_size;
  for (uint32_t t = 0; t < call.num_rows; ++t, y += num_columns) {
    size_t at = t * hidden + first_column;
    if (call.out_fp32)
      std::memcpy(call.out_fp32 + at, y, num_columns * sizeof(float));
    else
      for (int i = 0; i < num_columns; ++i)
        call.out_bf16[at + i] = bf16_from_float(y[i]);
  }
}

}  // namespace

void Buffer::Free::operator()(void* at) const { std::free(at); }

void* Buffer::reserve(size_t num_bytes) {
  if (num_bytes > size_) {
    size_t size = (num_bytes + num_bytes / 4 + 63) / 64 * 64;
    // Empty first: a call that finds no memory must leave nothing that looks like some.
    size_ = 0;
    data_.reset();
    data_.reset(std::aligned_alloc(64, size));
    if (!data_) throw std::bad_alloc();
    size_ = size;
  }
  return data_.get();
}

std::vector<const KernelTable*> supported_kernels() {
  return supported(
      {amx_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()});
}

std::string misfit(const ForwardCall& call, int n_routed_experts) {
  uint32_t rows = call.num_rows, topk = call.num_topk;
  if (topk == 0 || rows > (1u << 24) / topk)
    return "topk_ids must have 1 to 2^24 entries, got " + std::to_string(rows) + " x " +
           std::to_string(topk);
  for (size_t i = 0; i < size_t(rows) * topk; ++i)
    if (uint32_t(call.topk_ids[i]) >= uint32_t(n_routed_experts))
      return "topk_ids must be in [0, " + std::to_string(n_routed_experts) + "), got " +
             std::to_string(call.topk_ids[i]) + " in row " + std::to_string(i / topk) +
             "; the router and the duck disagree about n_routed_experts";
  return "";
}

Engine::Engine(const KernelTable* kernels, int num_threads,
               const std::vector<int>& cpus)
    : kernels_(kernels),
      pool_(num_threads, cpus),
      memory_(num_threads),
      memory_of_long_(num_threads) {}

void Engine::forward(const LayerCall& call) {
  Inside inside(&gate_, call.gives_way);
  FlushDenormals flush;
  CallMemory* memory = call.gives_way ? &memory_of_long_ : &memory_;
  int hidden = call.layer->shape().hidden_size;
  for (uint32_t t = 0; t < call.num_rows; t += kMaxRows) {
    LayerCall part = call;
    part.num_rows = std::min<uint32_t>(kMaxRows, call.num_rows - t);
    part.hidden += size_t(t) * hidden;
    part.topk_ids += size_t(t) * call.num_topk;
    part.topk_weights += size_t(t) * call.num_topk;
    if (part.out_fp32) part.out_fp32 += size_t(t) * hidden;
    if (part.out_bf16) part.out_bf16 += size_t(t) * hidden;
    forward_rows(part, memory);
  }
}

void Engine::forward_rows(const LayerCall& call, CallMemory* memory) {
  const LayerShape& shape = call.layer->shape();
  int num_pairs = plan(call, memory);
  size_t stride = shape.act_stride();
  size_t act_bytes = (num_pairs + kSpareRows) * stride * sizeof(uint16_t);
  auto* act = static_cast<uint16_t*>(memory->act.reserve(act_bytes));
  std::memset(act, 0, act_bytes);
  for (auto& rows : memory->active)
    rows.act = act + (rows.tokens - memory->pair_tokens.data()) * stride;
  size_t work = memory->active.size() * shape.expert_bytes();
  memory->num_workers =
      int(std::min<size_t>(pool_.num_threads(), 1 + work / kBytesPerWorker));
  for (int w = 0; w < memory->num_workers; ++w) {
    memory->scratch[w].reserve(kernels_->scratch_bytes(shape, memory->max_rows));
    memory->y[w].reserve(size_t(call.num_rows) * down_chunk(call.num_rows) * kGroup *
                         sizeof(float));
  }
  gate_up_phase(call, memory, widen_hidden(call, memory));
  down_phase(call, memory);
}

HiddenRows Engine::widen_hidden(const LayerCall& call, CallMemory* memory) {
  const LayerShape& shape = call.layer->shape();
  size_t hidden = shape.hidden_size;
  auto* fp32 = static_cast<float*>(
      memory->hidden_fp32.reserve(call.num_rows * hidden * sizeof(float)));
  auto& unscale = memory->hidden_unscale;
  unscale.assign(call.num_rows, 0);
  for (const auto& rows : memory->active) {
    if (rows.num_rows > kernels_->few_rows) continue;
    for (int r = 0; r < rows.num_rows; ++r) {
      int token = rows.tokens[r];
      if (unscale[token] != 0) continue;
      size_t at = token * hidden;
      unscale[token] =
          kernels_->widen(shape.format, call.hidden + at, hidden, fp32 + at);
    }
  }
  return {call.hidden, fp32, unscale.data()};
}

void Engine::gate_up_phase(const LayerCall& call, CallMemory* memory,
                           const HiddenRows& hidden) {
  const auto& active = memory->active;
  int groups = call.layer->shape().column_groups();
  bool is_many = memory->pair_tokens.size() > kManyRows * active.size();
  int num_regions = is_many ? 1 : std::min(memory->num_workers, groups);
  Regions regions(groups, int(active.size()), num_regions, is_many ? kManyGroups : 1);
  work(call, memory->num_workers, &regions, [&](int worker) {
    auto* scratch = static_cast<uint8_t*>(memory->scratch[worker].reserve(0));
    return [&, scratch](int expert, int begin, int end) {
      kernels_->gate_up(active[expert], begin, end, hidden, scratch);
    };
  });
}

// A unit owns a range of the output for all rows and goes through the experts in
// rising id: so the sums need no locks and have one order.
void Engine::down_phase(const LayerCall& call, CallMemory* memory) {
  int groups = call.layer->shape().hidden_groups();
  int num_regions = std::min(memory->num_workers, groups);
  Regions regions(groups, 1, num_regions, down_chunk(call.num_rows));
  work(call, memory->num_workers, &regions, [&](int worker) {
    auto* scratch = static_cast<uint8_t*>(memory->scratch[worker].reserve(0));
    auto* y = static_cast<float*>(memory->y[worker].reserve(0));
    return [&, scratch, y](int, int begin, int end) {
      size_t num_columns = size_t(end - begin) * kGroup;
      std::memset(y, 0, call.num_rows * num_columns * sizeof(float));
      for (const auto& rows : memory->active)
        kernels_->down(rows, begin, end, y, num_columns, scratch);
      write_out(call, y, begin * kGroup, int(num_columns));
    };
  });
}

// Has the workers share out all units; make_unit(worker) gives what a worker does with
// one. Calls that came meanwhile are let in between two units, with the rest of the
// units kept: the same sums in the same order.
template <class MakeUnit>
void Engine::work(const LayerCall& call, int num_workers, Regions* regions,
                  const MakeUnit& make_unit) {
  auto is_wanted = [&] { return call.gives_way && gate_.is_wanted(); };
  for (;;) {
    pool_.run(num_workers, [&](int worker) {
      regions->work(worker, is_wanted, make_unit(worker));
      if (kernels_->leave) kernels_->leave();
    });
    if (regions->are_over()) return;
    gate_.let_pass();
  }
}

void Engine::first_touch(Layer* layer) {
  Inside inside(&gate_, /*gives_way=*/false);
  const LayerShape& shape = layer->shape();
  int num_regions = pool_.num_threads();
  pool_.run(num_regions, [&](int worker) {
    auto share = [&](uint8_t* base, int groups, size_t group_bytes) {
      size_t begin = size_t(groups) * worker / num_regions * group_bytes;
      size_t end = size_t(groups) * (worker + 1) / num_regions * group_bytes;
      std::memset(base + begin, 0, end - begin);
    };
    for (int e = 0; e < shape.num_experts; ++e) {
      uint8_t* data = layer->expert_data(e);
      share(data, shape.column_groups(), 2 * shape.gate_group_bytes());
      share(data + shape.gate_up_bytes(), shape.hidden_groups(),
            shape.down_group_bytes());
      uint8_t* scales = data + shape.weight_bytes();
      share(scales, 1, shape.expert_bytes() - shape.weight_bytes());
    }
  });
}

}  // namespace duck
