#include "host/host.h"

namespace duck {
namespace host {

std::vector<const HostKernels*> supported_kernels() {
  return supported(
      {amx_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()});
}

Host::Host(const HostKernels* kernels, int num_threads, size_t work_per_thread)
    : kernels_(kernels),
      pool_(num_threads, {}),
      workers_(num_threads),
      work_per_thread_(work_per_thread) {}

void Host::reset() {
  shared_.reset();
  for (auto& arena : workers_) arena.reset();
}

}  // namespace host
}  // namespace duck
