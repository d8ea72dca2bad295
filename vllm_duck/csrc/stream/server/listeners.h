// The sockets that a server listens on. When the process has no descriptor or memory
// for another connection, they are not watched for a while: a connection that waits
// keeps them ready, and the server would turn in a circle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stream/ticket.h"

namespace duck::stream {

class Listeners {
 public:
  static constexpr int kRestMs = 500;

  // Takes the sockets over; in `epoll` the i-th has the key `first_key` + i.
  Listeners(std::vector<int> sockets, int epoll, uint64_t first_key);
  ~Listeners() { close(); }
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  // The next connection of the socket with this key, or -1; `notice` is then why they
  // rest, the first time that they do.
  int accept(uint64_t key, std::string* notice);
  bool is_resting() const { return is_resting_; }
  // Ends the rest if it is over; so it is as soon as a descriptor is free.
  void wake(Clock::time_point now);
  void end_rest() { wake_at_ = {}; }
  void close();

 private:
  void watch(int operation);

  std::vector<int> sockets_;
  int epoll_;
  uint64_t first_key_;
  bool is_resting_ = false;
  bool is_told_ = false;
  Clock::time_point wake_at_{};
};

}  // namespace duck::stream
