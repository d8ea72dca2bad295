// One call of the MoE layer: groups rows by expert, shares the work out to the pool.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/compute.h"
#include "base/pool.h"
#include "duck/kernels/kernel_table.h"
#include "duck/layer.h"
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
  void forward_rows(const LayerCall& call);
  int plan(const LayerCall& call);
  HiddenRows widen_hidden(const LayerCall& call);
  void gate_up_phase(const LayerCall& call, int num_workers, const HiddenRows& hidden);
  void down_phase(const LayerCall& call, int num_workers);
  void write_out(const LayerCall& call, const float* y, int first_column,
                 int num_columns);

  const KernelTable* kernels_;
  Pool pool_;
  std::mutex mutex_;
  // The plan of the current call: experts that have rows, in rising id.
  std::vector<ExpertRows> active_;
  std::vector<int> pair_tokens_;
  std::vector<float> pair_weights_;
  std::vector<int> expert_begin_;
  int max_rows_ = 0;
  Buffer act_;
  Buffer hidden_fp32_;
  std::vector<float> hidden_unscale_;  // [T], 0 where no copy was made
  std::vector<Buffer> scratch_;
  std::vector<Buffer> y_;
};

}  // namespace duck
