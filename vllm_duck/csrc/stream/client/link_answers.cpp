// What a link makes of what its duck says; called from within the connection.
#include <algorithm>

#include "stream/client/link.h"

namespace duck::stream {
namespace {

// A reply without its tensor: numbers, and a sentence for people.
constexpr size_t kMaxReplyHead = 64 << 10;

uint32_t microseconds_between(Clock::time_point from, Clock::time_point to) {
  return uint32_t(
      std::chrono::duration_cast<std::chrono::microseconds>(to - from).count());
}

// A duck that drains or ends a connection may be back on the next one.
bool is_passing(int code) {
  return code == kStatusOk || code == kStatusCancelled || code == kStatusUnavailable ||
         code == kStatusDataLoss;
}

}  // namespace

void Link::on_headers(Stream* stream, bool is_last) {
  const std::string* status = find_header(stream->headers, ":status");
  const std::string* type = find_header(stream->headers, "content-type");
  if (status && *status == "200" && (!type || type->rfind("application/grpc", 0) != 0))
    return lose({Failure::kProtocol, 0, "it answers, but not with gRPC"}, false);
  // The end of a call without messages: on_close() says why.
  if (is_last || is_proven_ || !status || *status != "200") return;
  const std::string* identity = find_header(stream->headers, kIdentityHeader);
  is_proven_ = identity && *identity == identity_;
  if (!is_proven_)
    return lose({Failure::kIdentity, 0, identity ? *identity : std::string()}, false);
  if (!is_recovering_) return;
  is_recovering_ = false;
  auto now = Clock::now();
  news_->push_back({index_, {Failure::kBack, milliseconds_between(lost_at_, now), ""}});
}

// Also of requests that were given up: their replies still come, to be dropped.
size_t Link::max_message_bytes(const Stream&) {
  return max_reply_bytes_ + kMaxReplyHead;
}

void Link::on_message(Stream*, Message message) {
  if (is_lost_) return;
  ReplyView reply;
  Parsed parsed = parse({message.data(), message.size()}, message.checksum, &reply);
  // A damaged reply has no id to trust: what is in flight is asked for again.
  if (parsed != Parsed::kOk || !reply.has_checksum) {
    const char* what = parsed == Parsed::kMalformed     ? "that does not parse"
                       : parsed == Parsed::kBadChecksum ? "with a wrong checksum"
                                                        : "without a checksum";
    return lose({Failure::kProtocol, 0,
                 "expected a duck.v1.ForwardReply, got " +
                     std::to_string(message.size()) + " bytes " + what},
                parsed != Parsed::kOk);
  }
  auto found = std::find_if(
      in_flight_.begin(), in_flight_.end(),
      [&](const auto& each) { return each->request_id == reply.request_id; });
  // Its request has missed its deadline, or was given up.
  if (found == in_flight_.end()) return;
  TicketRef ticket = std::move(*found);
  in_flight_.erase(found);
  num_losses_ = 0;
  loss_ = {};
  if (reply.status != uint32_t(ForwardStatus::kOk)) {
    std::string text(reinterpret_cast<const char*>(reply.error.data), reply.error.size);
    return ticket->fail(index_, {Failure::kRefused, int(reply.status), text});
  }
  size_t expected_bytes =
      size_t(ticket->num_rows) * ticket->hidden_size * element_bytes(ticket->dtype);
  if (reply.num_rows != ticket->num_rows || reply.hidden_size != ticket->hidden_size ||
      reply.dtype != uint32_t(ticket->dtype) || reply.partial.size != expected_bytes)
    return ticket->fail(
        index_,
        {Failure::kProtocol, 0,
         "expected a partial sum of shape [" + std::to_string(ticket->num_rows) + ", " +
             std::to_string(ticket->hidden_size) + "] in " +
             std::to_string(expected_bytes) + " bytes, got [" +
             std::to_string(reply.num_rows) + ", " + std::to_string(reply.hidden_size) +
             "] in " + std::to_string(reply.partial.size)});
  Slot& slot = ticket->slots[size_t(index_)];
  slot.is_done = true;
  slot.message = std::move(message);  // its memory stays where it is
  slot.reply = reply;
  slot.rtt_us = microseconds_between(slot.sent_at, Clock::now());
  --ticket->num_missing;
  log_.add({slot.rtt_us, reply.compute_us, reply.queue_us});
}

void Link::on_refusal(Stream* stream, Connection::Refusal why) {
  if (why == Connection::Refusal::kCompressed)
    return lose(
        {Failure::kProtocol, 0,
         "it compresses its replies; vllm_duck does not read compressed messages"},
        false);
  if (why == Connection::Refusal::kNoMemory)
    return lose({Failure::kStatus, kStatusResourceExhausted,
                 "the host has no memory for a reply of " +
                     std::to_string(stream->inbox.announced_bytes()) + " bytes"},
                false);
  lose({Failure::kProtocol, 0,
        "expected a reply of at most " + std::to_string(max_message_bytes(*stream)) +
            " bytes, got one of " + std::to_string(stream->inbox.announced_bytes())},
       false);
}

void Link::on_close(Stream* stream, uint32_t h2_error) {
  if (stream->id != stream_) return;
  Status end = status_of(stream->headers, stream->trailers, h2_error);
  // The right duck refuses nothing of a request that was sound when it left: what it
  // refuses was damaged on the way.
  bool may_resend = is_proven_ || is_passing(end.code);
  if (end.code == kStatusOk) end = {kStatusUnavailable, "it ended the stream"};
  lose({Failure::kStatus, end.code, end.text}, may_resend);
}

void Link::on_goaway() { is_leaving_ = true; }

}  // namespace duck::stream
