// One request in flight at all ducks, and what became of it at each.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "stream/payload.h"
#include "stream/proto.h"

namespace duck::stream {

using Clock = std::chrono::steady_clock;

inline int milliseconds_between(Clock::time_point from, Clock::time_point to) {
  return int(std::chrono::duration_cast<std::chrono::milliseconds>(to - from).count());
}

// Why a duck gave no partial sum; Python makes its error of it.
struct Failure {
  enum Kind {
    kStatus = 0,   // code: a gRPC status
    kRefused = 1,  // code: `Status` of duck.proto
    kTimeout = 2,
    kProtocol = 3,
    kClosed = 4,
    kIdentity = 5,  // text: who answered instead of the duck
    kGaveUp = 6,    // code: milliseconds that it was lost, text: why
    // No failures, but news of a duck.
    kLost = 7,      // text: why
    kBack = 8,      // code: milliseconds that it was lost
    kStaleTls = 9,  // text: why files of TLS that have changed are not used
  };
  Kind kind;
  int code;
  std::string text;
};

struct Slot {
  bool is_done = false;
  int num_losses = 0;           // connections that broke before the answer came
  Clock::time_point sent_at{};  // for the last time
  Clock::time_point deadline{};
  Message message;
  ReplyView reply;  // into message
  uint32_t rtt_us = 0;
};

struct Ticket {
  uint64_t request_id;
  PayloadRef request;
  size_t max_reply_bytes;
  uint32_t num_rows, hidden_size;
  DType dtype;
  Clock::time_point start;
  // Of all ducks, where none is recovered; see Slot for the others.
  Clock::time_point deadline;
  std::vector<Slot> slots;  // by duck
  int num_missing;
  // The first failure; the others do not matter any more.
  int failed_duck = -1;
  Failure failure;

  bool is_settled() const { return num_missing == 0 || failed_duck >= 0; }
  void fail(int duck, Failure why) {
    if (is_settled()) return;
    failed_duck = duck;
    failure = std::move(why);
  }
};

using TicketRef = std::shared_ptr<Ticket>;

}  // namespace duck::stream
