// One request on its way through the kernel.
#pragma once

#include "base/compute.h"
#include "stream/proto.h"
#include "stream/ticket.h"

namespace duck::stream {

struct Job {
  uint64_t peer_id;
  int32_t stream_id;
  Message message;
  RequestView request;  // into message
  Clock::time_point arrival;
  bool is_long = false;  // gives way to others
  PayloadRef reply;
};

// Fills job->reply, whatever happens; it stays null if there is no memory for a
// sentence.
void answer(const Compute& compute, Job* job) noexcept;

}  // namespace duck::stream
