#include "stream/server/peer.h"

#include <algorithm>
#include <new>
#include <utility>

namespace duck::stream {
namespace {

// Of one connection; a host needs one, and a few more for looking at the duck.
constexpr uint32_t kMaxStreams = 64;
constexpr size_t kMaxWaitingRequests = 64;
// Replies that a host has not read; then its requests wait.
constexpr size_t kMaxUnsentBytes = 64 << 20;
// Messages of the other methods are names and flags.
constexpr size_t kMaxControlBytes = 4 << 10;

}  // namespace

Peer::Peer(uint64_t id, int socket, std::unique_ptr<Tls> tls, Owner* owner)
    : id_(id),
      owner_(owner),
      connection_(socket, /*is_server=*/true, kMaxStreams, this, std::move(tls)) {}

Peer::~Peer() {
  for (const auto& [stream_id, call] : calls_) {
    end_call(call);
    try {
      if (!call.is_forward)
        owner_->control_event({call.control_id, ControlEvent::kGone, "", Message()});
    } catch (const std::bad_alloc&) {
      // Then it is answered, to nobody.
    }
  }
  calls_.clear();
  if (!share_) return;
  --share_->num_connections;
  share_->num_bytes -= charged_bytes_;
}

void Peer::become_host(ShareRef share) {
  share_ = std::move(share);
  ++share_->num_connections;
}

void Peer::charge() {
  if (!share_) return;
  size_t num_bytes = in_flight_bytes();
  share_->num_bytes += num_bytes - charged_bytes_;
  charged_bytes_ = num_bytes;
}

size_t Peer::in_flight_bytes() {
  size_t total = connection_.unsent_bytes();
  for (const auto& [stream_id, call] : calls_) {
    total += call.waiting_bytes;
    Stream* stream = connection_.find(stream_id);
    if (stream && call.is_forward) total += stream->inbox.unfinished_bytes();
  }
  return total;
}

void Peer::end_call(const Call& call) {
  owner_->call_ended(call.is_counted);
  if (call.is_counted) --share_->num_calls;
}

bool Peer::has_job() const {
  return !waiting_.empty() && connection_.unsent_bytes() <= kMaxUnsentBytes;
}

std::unique_ptr<Job> Peer::take_job() {
  std::unique_ptr<Job> job = std::move(waiting_.front());
  waiting_.pop_front();
  Call& call = calls_.at(job->stream_id);
  --call.num_waiting;
  call.waiting_bytes -= job->message.size();
  ++call.num_computing;
  if (Stream* stream = connection_.find(job->stream_id)) hold_or_reopen(stream, call);
  return job;
}

void Peer::deliver(int32_t stream_id, PayloadRef reply) {
  auto found = calls_.find(stream_id);
  Stream* stream = connection_.find(stream_id);
  if (found == calls_.end() || !stream) return;
  --found->second.num_computing;
  if (!reply)
    connection_.finish(stream, {kStatusResourceExhausted, "the duck has no memory"});
  else if (!stream->is_ending)
    connection_.send(stream, std::move(reply));
  end_if_answered(stream, found->second);
}

void Peer::send(int32_t stream_id, PayloadRef message) {
  Stream* stream = connection_.find(stream_id);
  auto found = calls_.find(stream_id);
  if (!stream || found == calls_.end()) return;
  if (found->second.num_waiting) --found->second.num_waiting;
  connection_.send(stream, std::move(message));
}

void Peer::finish(int32_t stream_id, const Status& status) {
  if (Stream* stream = connection_.find(stream_id)) connection_.finish(stream, status);
}

void Peer::drain() {
  connection_.announce_end();
  for (auto& [stream_id, call] : calls_) {
    Stream* stream = connection_.find(stream_id);
    if (!stream || !call.is_forward) continue;
    stream->is_ignored = true;
    call.is_last_request_in = true;
    end_if_answered(stream, call);
  }
}

void Peer::hold_or_reopen(Stream* stream, const Call& call) {
  bool is_full = call.num_waiting >= kMaxWaitingRequests ||
                 call.waiting_bytes >= owner_->max_message_bytes();
  if (is_full)
    stream->is_held = true;
  else if (stream->is_held)
    connection_.reopen(stream);
}

void Peer::end_if_answered(Stream* stream, const Call& call) {
  if (call.is_last_request_in && call.num_waiting + call.num_computing == 0)
    connection_.finish(stream, {kStatusOk, ""});
}

void Peer::on_headers(Stream* stream, bool) {
  if (stream->is_oversized)
    return connection_.finish(
        stream, {kStatusResourceExhausted,
                 "expected metadata of at most " + std::to_string(kMaxHeaderBytes) +
                     " bytes, got " + std::to_string(stream->header_bytes)});
  const std::string* path = find_header(stream->headers, ":path");
  const std::string method = path ? *path : "";
  Status status = owner_->admit(this, method, stream->headers);
  if (status.code != kStatusOk) return connection_.finish(stream, status);
  Call call{};
  call.is_forward = method == kForwardPath;
  call.is_counted = is_host();
  if (call.is_forward)
    ++num_forward_calls_;
  else
    call.control_id = owner_->control_call(this, stream->id);
  calls_.emplace(stream->id, call);
  Headers more;
  if (call.is_forward) more.emplace_back(kIdentityHeader, owner_->identity());
  connection_.respond(stream, more);
  if (!call.is_forward)
    owner_->control_event({call.control_id, ControlEvent::kStart, method, Message()});
}

size_t Peer::max_message_bytes(const Stream& stream) {
  auto found = calls_.find(stream.id);
  if (found == calls_.end() || !found->second.is_forward) return kMaxControlBytes;
  charge();
  size_t most = max_share_bytes(owner_->max_message_bytes());
  size_t left = most - std::min(most, share_->num_bytes);
  return std::min(owner_->max_message_bytes(), left);
}

void Peer::on_message(Stream* stream, Message message) {
  auto found = calls_.find(stream->id);
  if (found == calls_.end()) return;
  Call& call = found->second;
  if (!call.is_forward) {
    if (++call.num_waiting > kMaxWaitingRequests)
      return connection_.finish(
          stream, {kStatusResourceExhausted, "too many messages wait for an answer"});
    return owner_->control_event(
        {call.control_id, ControlEvent::kMessage, "", std::move(message)});
  }
  auto job = std::make_unique<Job>();
  job->peer_id = id_;
  job->stream_id = stream->id;
  job->arrival = Clock::now();
  job->message = std::move(message);
  size_t num_bytes = job->message.size();
  Parsed parsed =
      parse({job->message.data(), num_bytes}, job->message.checksum, &job->request);
  if (parsed != Parsed::kOk) {
    bool is_damaged = parsed == Parsed::kBadChecksum;
    return connection_.finish(
        stream, {is_damaged ? kStatusDataLoss : kStatusInvalidArgument,
                 "expected a duck.v1.ForwardRequest, got " + std::to_string(num_bytes) +
                     (is_damaged ? " bytes with a wrong checksum"
                                 : " bytes that do not parse as one")});
  }
  ++call.num_waiting;
  call.waiting_bytes += num_bytes;
  waiting_.push_back(std::move(job));
  hold_or_reopen(stream, call);
}

void Peer::on_refusal(Stream* stream, Connection::Refusal why) {
  if (why == Connection::Refusal::kCompressed)
    return connection_.finish(
        stream, {kStatusUnimplemented, "a duck does not read compressed messages"});
  if (why == Connection::Refusal::kNoMemory)
    return connection_.finish(
        stream, {kStatusResourceExhausted,
                 "the duck has no memory for a message of " +
                     std::to_string(stream->inbox.announced_bytes()) + " bytes"});
  auto found = calls_.find(stream->id);
  bool is_forward = found != calls_.end() && found->second.is_forward;
  size_t most = is_forward ? owner_->max_message_bytes() : kMaxControlBytes;
  size_t announced = stream->inbox.announced_bytes();
  if (announced <= most)
    return connection_.finish(
        stream,
        {kStatusResourceExhausted,
         "the hosts of an address have " + std::to_string(max_share_bytes(most)) +
             " bytes of requests and replies at once, got one of " +
             std::to_string(announced) + " more"});
  connection_.finish(stream, {kStatusResourceExhausted,
                              "expected a message of at most " + std::to_string(most) +
                                  " bytes, got one of " + std::to_string(announced)});
}

void Peer::on_half_close(Stream* stream) {
  auto found = calls_.find(stream->id);
  if (found == calls_.end()) return;
  Call& call = found->second;
  if (!call.is_forward)
    return owner_->control_event(
        {call.control_id, ControlEvent::kHalfClose, "", Message()});
  if (!stream->inbox.is_between_messages())
    return connection_.finish(
        stream, {kStatusInvalidArgument, "the stream ended within a message"});
  call.is_last_request_in = true;
  end_if_answered(stream, call);
}

void Peer::on_close(Stream* stream, uint32_t) {
  auto found = calls_.find(stream->id);
  if (found == calls_.end()) return;
  Call call = found->second;
  calls_.erase(found);
  end_call(call);
  if (!call.is_forward)
    return owner_->control_event({call.control_id, ControlEvent::kGone, "", Message()});
  --num_forward_calls_;
  // Nobody waits for them.
  auto is_its_job = [stream](const auto& job) { return job->stream_id == stream->id; };
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_its_job),
                 waiting_.end());
}

}  // namespace duck::stream
