// One call of the MoE layer: groups rows by expert, shares the work out to the pool.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/compute.h"
#include "base/pool.h"
#include "duck/gate.h"
#include "duck/kernels/kernel_table.h"
#include "duck/layer.h"
#include "duck/regions.h"
#include "simd/dispatch.h"

namespace duck {

// Best first.
std::vector<const KernelTable*> supported_kernels();

// Why no layer can compute a call's rows; empty if its layer can.
std::string misfit(const ForwardCall& call, int n_routed_experts);

struct LayerCall : ForwardCall {
  const Layer* layer;
  int expert_lo;  // global id of the layer's first expert
};

// A piece of zeroed or grown memory, 64-byte aligned, kept between calls.
class Buffer {
 public:
  void* reserve(size_t num_bytes);

 private:
  struct Free {
    void operator()(void* at) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// What a call computes with.
struct CallMemory {
  explicit CallMemory(int num_workers) : scratch(num_workers), y(num_workers) {}

  // Its plan: experts that have rows, in rising id.
  std::vector<ExpertRows> active;
  std::vector<int> pair_tokens;
  std::vector<float> pair_weights;
  std::vector<int> expert_begin;
  int max_rows = 0;
  Buffer act;
  Buffer hidden_fp32;
  std::vector<float> hidden_unscale;  // [T], 0 where no copy was made
  // Of each worker.
  std::vector<Buffer> scratch;
  std::vector<Buffer> y;
  int num_workers = 1;
};

class Engine {
 public:
  Engine(const KernelTable* kernels, int num_threads, const std::vector<int>& cpus);

  const char* isa() const { return kernels_->name; }
  int num_threads() const { return pool_.num_threads(); }

  // Calls from several threads take turns. It must fit.
  void forward(const LayerCall& call);

  // Has each worker write the memory that it will read, so that on a NUMA machine the
  // pages are local to it. Before the layer is loaded.
  void first_touch(Layer* layer);

 private:
  void forward_rows(const LayerCall& call, CallMemory* memory);
  HiddenRows widen_hidden(const LayerCall& call, CallMemory* memory);
  void gate_up_phase(const LayerCall& call, CallMemory* memory,
                     const HiddenRows& hidden);
  void down_phase(const LayerCall& call, CallMemory* memory);
  template <class MakeUnit>
  void work(const LayerCall& call, int num_workers, Regions* regions,
            const MakeUnit& make_unit);

  const KernelTable* kernels_;
  Pool pool_;
  Gate gate_;
  CallMemory memory_;
  CallMemory memory_of_long_;  // of the call that gives way
};

}  // namespace duck
