// The process's one set of threads and kernels; calls take turns.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/kernels/kernels.h"
#include "simd/dispatch.h"

namespace duck {
namespace host {

// Best first.
std::vector<const HostKernels*> supported_kernels();

class Host {
 public:
  Host(const HostKernels* kernels, int num_threads, size_t work_per_thread);

  const char* isa() const { return kernels_->name; }
  int num_threads() const { return pool_.num_threads(); }

  // make(pool): packs weights on all threads.
  template <class Make>
  auto pack(const Make& make) {
    std::lock_guard<std::mutex> lock(mutex_);
    return make(&pool_);
  }

  // Throws what a share of the call throws: std::bad_alloc, where scratch is short. The
  // next call is not affected.
  template <class Call>
  void run(void (*HostKernels::*kernel)(const Threads&, const Call&),
           const Call& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    FlushDenormals flush;
    Cleared scratch = {this};
    (kernels_->*kernel)({&pool_, &shared_, workers_.data(), work_per_thread_}, call);
  }

 private:
  // However the call ends.
  struct Cleared {
    Host* host;
    ~Cleared() { host->reset(); }
  };
  void reset();

  const HostKernels* kernels_;
  Pool pool_;
  std::mutex mutex_;
  Arena shared_;
  std::vector<Arena> workers_;
  size_t work_per_thread_;
};

}  // namespace host
}  // namespace duck
