// Connects to the first of an endpoint's addresses that answers.
//
// The next address is tried when one has failed, or is silent for 250 ms; that one
// stays in the race (RFC 8305). So an address that drops everything costs a moment, not
// the call.
#pragma once

#include <string>
#include <vector>

#include "stream/endpoint.h"
#include "stream/ticket.h"

namespace duck::stream {

class Dialer {
 public:
  enum class Outcome { kPending, kConnected, kFailed };

  // `owner` is what epoll says of the sockets; then, and when due(), advance().
  Dialer(const std::string& endpoint, int epoll, void* owner);
  ~Dialer();

  const Endpoint& endpoint() const { return endpoint_; }
  // Looks a host name up each time: it may have moved.
  Outcome start(Clock::time_point now);
  Outcome advance(Clock::time_point now);
  Clock::time_point due() const;
  // After kConnected: the socket, which is the caller's now.
  int take_socket();
  // After kFailed.
  const std::string& error() const { return error_; }
  void stop();

 private:
  bool find_connected();
  void dial(const Endpoint::Address& address);
  Outcome dial_on(Clock::time_point now);

  Endpoint endpoint_;
  int epoll_;
  void* owner_;
  std::vector<Endpoint::Address> addresses_;
  size_t num_tried_ = 0;
  std::vector<int> sockets_;  // on their way; the first has won after kConnected
  Clock::time_point next_at_{};
  Clock::time_point give_up_at_{};
  std::string error_;
};

}  // namespace duck::stream
