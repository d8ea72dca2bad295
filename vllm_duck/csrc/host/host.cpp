#include "host/host.h"

namespace duck {
namespace host {

std::vector<const Calls*> supported_calls() {
  std::vector<const Calls*> found;
  for (auto* calls : {amx_calls(), avx512_calls(), avx2_calls(), portable_calls()})
    if (calls) found.push_back(calls);
  return found;
}

const Calls* find_calls(const std::string& name) {
  for (auto* calls : supported_calls())
    if (name.empty() || name == calls->name) return calls;
  return nullptr;
}

Host::Host(const Calls* calls, int num_threads, size_t work_per_thread)
    : calls_(calls),
      pool_(num_threads, {}),
      workers_(num_threads),
      work_per_thread_(work_per_thread) {}

size_t Host::most_scratch_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t total = shared_.most_bytes();
  for (auto& arena : workers_) total += arena.most_bytes();
  return total;
}

void Host::reset() {
  shared_.reset();
  for (auto& arena : workers_) arena.reset();
}

}  // namespace host
}  // namespace duck
