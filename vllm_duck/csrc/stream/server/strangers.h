// Connections that have shown no right to be here: none of their calls has been let in
// but health checks, which need no token. They have a small share of a duck.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>

#include "stream/ticket.h"

namespace duck::stream {

class Strangers {
 public:
  // At most so many connections; one more takes the place of the oldest.
  static constexpr size_t kMax = 32;
  // Each has at most so many calls, and without one so long to begin one.
  static constexpr size_t kMaxCalls = 4;
  static constexpr auto kPatience = std::chrono::seconds(10);
  static constexpr auto kLook = std::chrono::seconds(1);

  void add(uint64_t peer_id, Clock::time_point now) { since_[peer_id] = now; }
  // It is a host, or has gone.
  void forget(uint64_t peer_id) { since_.erase(peer_id); }
  bool is_full() const { return since_.size() >= kMax; }
  // There must be one; ids rise with time.
  uint64_t oldest() const { return since_.begin()->first; }

  // act(peer id) for those that have been here for too long, once a second at most;
  // act may forget it.
  template <class Act>
  void each_late(Clock::time_point now, const Act& act);
  // How long the next look may be away; -1: for ever.
  int wait_ms() const { return since_.empty() ? -1 : 1000; }

 private:
  std::map<uint64_t, Clock::time_point> since_;
  Clock::time_point next_look_{};
};

template <class Act>
void Strangers::each_late(Clock::time_point now, const Act& act) {
  if (since_.empty() || now < next_look_) return;
  next_look_ = now + kLook;
  for (auto at = since_.begin(); at != since_.end();) {
    auto [peer_id, since] = *at++;
    if (now - since > kPatience) act(peer_id);
  }
}

}  // namespace duck::stream
