#include "stream/client/link.h"

#include <sys/epoll.h>

#include <algorithm>

namespace duck::stream {
namespace {

using std::chrono::milliseconds;

// A request is sent on at most this many connections.
constexpr int kMaxSends = 3;
// Before the second connection in a row, and four times that before the third.
constexpr auto kBackoff = milliseconds(50);
constexpr int kPeerLostS = 15;
// A reply without its tensor: numbers, and a sentence for people.
constexpr size_t kMaxReplyHead = 64 << 10;
constexpr auto kNever = Clock::time_point::max();

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

void CallLog::add(CallTimes times) {
  if (latest_.size() < kWindow)
    latest_.push_back(times);
  else
    latest_[num_calls_ % kWindow] = times;
  ++num_calls_;
}

Link::Link(int index, const std::string& endpoint, const std::string& identity,
           const std::string& authorization, int epoll, Clock::duration quiet)
    : index_(index),
      identity_(identity),
      epoll_(epoll),
      dialer_(endpoint, epoll, this),
      quiet_(quiet) {
  headers_ = {{":method", "POST"},
              {":scheme", "http"},
              {":path", "/duck.v1.Duck/Forward"},
              {":authority", dialer_.endpoint().authority()},
              {"te", "trailers"},
              {"content-type", "application/grpc"},
              {"user-agent", "vllm-duck"}};
  if (!authorization.empty()) headers_.emplace_back("authorization", authorization);
}

Link::~Link() { disconnect(); }

void Link::start(const TicketRef& ticket, Clock::time_point now) {
  if (in_flight_.empty() && waiting_.empty()) {
    last_heard_ = now;
    is_pinged_ = false;
  }
  waiting_.push_back(ticket);
  if (state_ == State::kDown && reconnect_at_ <= now) connect(now);
  if (state_ != State::kOpen) return;
  send_waiting();
  flush(now);
}

void Link::forget(const Ticket* ticket) {
  auto is_it = [ticket](const TicketRef& each) { return each.get() == ticket; };
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_it),
                 waiting_.end());
  auto found = std::find_if(in_flight_.begin(), in_flight_.end(), is_it);
  if (found == in_flight_.end()) return;
  in_flight_.erase(found);
  // Unsent bytes of a later request count too: all of them wait for this duck.
  bool is_stuck = ticket->failed_duck == index_ &&
                  ticket->failure.kind == Failure::kTimeout && connection_ &&
                  connection_->unsent_bytes() > 0;
  if (is_stuck) {
    lose({Failure::kStatus, kStatusUnavailable, "it takes no more bytes"}, true);
    settle(Clock::now());
  }
}

void Link::connect(Clock::time_point now) {
  state_ = State::kConnecting;
  on_dialed(dialer_.start(now), now);
}

void Link::on_dialed(Dialer::Outcome outcome, Clock::time_point now) {
  if (outcome == Dialer::Outcome::kFailed) return connect_failed(dialer_.error(), now);
  if (outcome == Dialer::Outcome::kPending) return;
  on_connected(now);
  flush(now);
}

void Link::connect_failed(const std::string& reason, Clock::time_point now) {
  disconnect();
  std::string text = reason;
  if (!loss_.text.empty()) text += ", after: " + loss_.text;
  num_losses_ = 0;
  loss_ = {};
  reconnect_at_ = now;
  fail_all({Failure::kStatus, kStatusUnavailable, text});
}

void Link::on_connected(Clock::time_point now) {
  int socket = dialer_.take_socket();
  tune_socket(socket, kPeerLostS);
  connection_ = std::make_unique<Connection>(socket, /*is_server=*/false, 0,
                                             static_cast<Connection::Owner*>(this));
  state_ = State::kOpen;
  is_leaving_ = is_pinged_ = is_proven_ = false;
  last_heard_ = now;
  num_heard_ = 0;
  max_reply_bytes_ = 0;
  stream_ = connection_->open_stream(headers_);
  is_watching_writes_ = true;
  watch(false);
}

void Link::watch(bool wants_write) {
  if (wants_write == is_watching_writes_) return;
  is_watching_writes_ = wants_write;
  epoll_event event{};
  event.events = uint32_t(EPOLLIN) | (wants_write ? uint32_t(EPOLLOUT) : 0u);
  event.data.ptr = this;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection_->socket(), &event);
}

void Link::send_waiting() {
  Stream* stream = connection_->find(stream_);
  if (!stream || !is_proven_ || is_leaving_ || is_lost_) return;
  for (; !waiting_.empty(); waiting_.pop_front()) {
    max_reply_bytes_ = std::max(max_reply_bytes_, waiting_.front()->max_reply_bytes);
    connection_->send(stream, waiting_.front()->request);
    in_flight_.push_back(std::move(waiting_.front()));
  }
}

void Link::flush(Clock::time_point now) {
  if (!connection_->flush())
    lose({Failure::kStatus, kStatusUnavailable, connection_->end_reason()}, true);
  settle(now);
}

void Link::on_event(uint32_t events, Clock::time_point now) {
  if (state_ == State::kConnecting) return on_dialed(dialer_.advance(now), now);
  if (state_ != State::kOpen) return;
  bool is_alive = true;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) is_alive = connection_->receive();
  if (is_alive && (events & EPOLLOUT)) is_alive = connection_->flush();
  if (!is_alive)
    lose({Failure::kStatus, kStatusUnavailable, connection_->end_reason()}, true);
  // It has just proved itself.
  if (is_proven_ && !is_lost_ && !waiting_.empty()) {
    send_waiting();
    return flush(now);
  }
  settle(now);
}

// Acts on what the callbacks have found.
void Link::settle(Clock::time_point now) {
  if (state_ != State::kOpen) return;
  if (is_leaving_ && in_flight_.empty() && !is_lost_)
    lose({Failure::kStatus, kStatusUnavailable, "it ended the connection"}, true);
  if (!is_lost_) return watch(connection_->is_clogged());
  is_lost_ = false;
  disconnect();
  if (!in_flight_.empty() || !waiting_.empty()) ++num_losses_;
  // Back to the front, in their order.
  waiting_.insert(waiting_.begin(), in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  if (may_resend_)
    fail_often_lost();
  else
    fail_all(loss_);
  reconnect_at_ = now;
  if (num_losses_ > 1)
    reconnect_at_ += kBackoff * (1 << 2 * std::min(num_losses_ - 2, 3));
  if (!waiting_.empty() && reconnect_at_ <= now) connect(now);
}

void Link::lose(Failure why, bool may_resend) {
  if (is_lost_) return;
  is_lost_ = true;
  may_resend_ = may_resend;
  loss_ = std::move(why);
}

void Link::disconnect() {
  dialer_.stop();
  connection_.reset();
  stream_ = 0;
  state_ = State::kDown;
}

// Also those that waited for the duck to prove itself.
void Link::fail_often_lost() {
  auto is_over = [this](const TicketRef& ticket) {
    if (++ticket->slots[size_t(index_)].num_losses < kMaxSends) return false;
    ticket->fail(index_, loss_);
    return true;
  };
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_over),
                 waiting_.end());
}

void Link::fail_all(const Failure& why) {
  for (auto& ticket : in_flight_) ticket->fail(index_, why);
  for (auto& ticket : waiting_) ticket->fail(index_, why);
  in_flight_.clear();
  waiting_.clear();
}

Clock::time_point Link::on_time(Clock::time_point now) {
  if (state_ == State::kDown) {
    if (waiting_.empty()) return kNever;
    if (reconnect_at_ <= now) connect(now);
    if (state_ == State::kDown) return waiting_.empty() ? kNever : reconnect_at_;
  }
  if (state_ == State::kConnecting) {
    if (now < dialer_.due()) return dialer_.due();
    on_dialed(dialer_.advance(now), now);
    return state_ == State::kConnecting ? dialer_.due() : now;
  }
  if (in_flight_.empty() && (is_proven_ || waiting_.empty())) return kNever;
  if (connection_->num_received() != num_heard_) {
    num_heard_ = connection_->num_received();
    last_heard_ = now;
    is_pinged_ = false;
  }
  auto due = last_heard_ + (is_pinged_ ? quiet_ * 3 / 2 : quiet_);
  if (now < due) return due;
  if (is_pinged_) {
    lose({Failure::kStatus, kStatusUnavailable, "it does not answer pings"}, true);
    settle(now);
    return now + milliseconds(1);
  }
  is_pinged_ = true;
  connection_->ping();
  flush(now);
  return now + quiet_ / 2;
}

void Link::close() {
  fail_all({Failure::kClosed, 0, "the client was closed"});
  disconnect();
}

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
    lose({Failure::kIdentity, 0, identity ? *identity : std::string()}, false);
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
  slot.rtt_us = microseconds_between(ticket->start, Clock::now());
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
  bool may_resend = is_passing(end.code);
  if (end.code == kStatusOk) end = {kStatusUnavailable, "it ended the stream"};
  lose({Failure::kStatus, end.code, end.text}, may_resend);
}

void Link::on_goaway() { is_leaving_ = true; }

}  // namespace duck::stream
