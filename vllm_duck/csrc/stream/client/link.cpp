#include "stream/client/link.h"

#include <sys/epoll.h>

#include <algorithm>
#include <sstream>

namespace duck::stream {
namespace {

using std::chrono::milliseconds;

// A request is sent on at most this many connections: it may be what kills the duck.
constexpr int kMaxSends = 3;
// Before the second connection in a row, and twice that before each next one.
constexpr auto kBackoff = milliseconds(50);
constexpr auto kLongestBackoff = milliseconds(2000);
constexpr int kPeerLostS = 15;
constexpr size_t kAuthority = 3;  // of the headers
constexpr auto kNever = Clock::time_point::max();

}  // namespace

void CallLog::add(CallTimes times) {
  if (latest_.size() < kWindow)
    latest_.push_back(times);
  else
    latest_[num_calls_ % kWindow] = times;
  ++num_calls_;
}

Link::Link(int index, const std::string& endpoints, const std::string& identity,
           const std::string& authorization, TlsContext* tls, int epoll,
           const Patience* patience, std::vector<News>* news)
    : index_(index),
      identity_(identity),
      tls_(tls),
      epoll_(epoll),
      patience_(patience),
      news_(news) {
  std::istringstream list(endpoints);
  for (std::string each; std::getline(list, each, '|');)
    replicas_.push_back(std::make_unique<Dialer>(each, epoll, this));
  headers_ = {{":method", "POST"},
              {":scheme", tls ? "https" : "http"},
              {":path", "/duck.v1.Duck/Forward"},
              {":authority", ""},  // the replica's, see on_connected()
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
    if (is_recovering_) note_loss(now);  // nobody has looked for it meanwhile
  }
  ticket->slots[size_t(index_)].deadline = now + patience_->deadline;
  waiting_.push_back(ticket);
  if (state_ == State::kDown && reconnect_at_ <= now) connect(now);
  if (state_ != State::kOpen) return;
  send_waiting(now);
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
  on_dialed(dialer().start(now), now);
}

void Link::on_dialed(Dialer::Outcome outcome, Clock::time_point now) {
  if (outcome == Dialer::Outcome::kFailed) return connect_failed(dialer().error(), now);
  if (outcome == Dialer::Outcome::kPending) return;
  on_connected(now);
  flush(now);
}

void Link::connect_failed(const std::string& reason, Clock::time_point now) {
  disconnect();
  Failure why = {Failure::kStatus, kStatusUnavailable, named(reason)};
  if (++num_losses_ < replicas_.size() || can_recover()) {
    loss_ = why;
    return reconnect_later(now);
  }
  if (!loss_.text.empty()) why.text += ", after: " + loss_.text;
  num_losses_ = 0;
  loss_ = {};
  reconnect_at_ = now;
  fail_all(why);
}

void Link::on_connected(Clock::time_point now) {
  int socket = dialer().take_socket();
  tune_socket(socket, kPeerLostS);
  connection_ =
      std::make_unique<Connection>(socket, /*is_server=*/false, 0,
                                   static_cast<Connection::Owner*>(this), open_tls());
  state_ = State::kOpen;
  is_leaving_ = is_pinged_ = is_proven_ = false;
  last_heard_ = now;
  num_heard_ = 0;
  max_reply_bytes_ = 0;
  headers_[kAuthority].second = dialer().endpoint().authority();
  stream_ = connection_->open_stream(headers_);
  is_watching_writes_ = true;
  watch(false);
}

std::unique_ptr<Tls> Link::open_tls() {
  if (!tls_) return nullptr;
  auto tls = tls_->open(dialer().endpoint().host());
  std::string notice = tls_->take_notice();
  if (!notice.empty()) news_->push_back({index_, {Failure::kStaleTls, 0, notice}});
  return tls;
}

void Link::watch(bool wants_write) {
  if (wants_write == is_watching_writes_) return;
  is_watching_writes_ = wants_write;
  epoll_event event{};
  event.events = uint32_t(EPOLLIN) | (wants_write ? uint32_t(EPOLLOUT) : 0u);
  event.data.ptr = this;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection_->socket(), &event);
}

void Link::send_waiting(Clock::time_point now) {
  Stream* stream = connection_->find(stream_);
  if (!stream || !is_proven_ || is_leaving_ || is_lost_) return;
  for (; !waiting_.empty(); waiting_.pop_front()) {
    max_reply_bytes_ = std::max(max_reply_bytes_, waiting_.front()->max_reply_bytes);
    connection_->send(stream, waiting_.front()->request);
    Slot& slot = waiting_.front()->slots[size_t(index_)];
    slot.sent_at = now;
    slot.deadline = now + patience_->deadline;
    in_flight_.push_back(std::move(waiting_.front()));
  }
}

void Link::flush(Clock::time_point now) {
  if (!connection_->flush())
    lose({Failure::kStatus, kStatusUnavailable, connection_->end_reason()}, true);
  settle(now);
}

void Link::on_event(uint32_t events, Clock::time_point now) {
  if (state_ == State::kConnecting) return on_dialed(dialer().advance(now), now);
  if (state_ != State::kOpen) return;
  bool is_alive = true;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) is_alive = connection_->receive();
  if (is_alive && (events & EPOLLOUT)) is_alive = connection_->flush();
  if (!is_alive)
    lose({Failure::kStatus, kStatusUnavailable, connection_->end_reason()}, true);
  // It has just proved itself.
  if (is_proven_ && !is_lost_ && !waiting_.empty()) {
    send_waiting(now);
    return flush(now);
  }
  settle(now);
}

// Acts on what the callbacks have found.
void Link::settle(Clock::time_point now) {
  if (state_ != State::kOpen && !is_lost_) return;
  if (is_leaving_ && in_flight_.empty() && !is_lost_)
    lose({Failure::kStatus, kStatusUnavailable, "it ended the connection"}, true);
  if (!is_lost_) return watch(connection_->is_clogged());
  is_lost_ = false;
  disconnect();
  if (!in_flight_.empty() || !waiting_.empty()) ++num_losses_;
  // Back to the front, in their order.
  size_t num_sent = in_flight_.size();
  waiting_.insert(waiting_.begin(), in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  if (may_resend_)
    fail_often_lost(num_sent);
  else
    fail_all(loss_);
  reconnect_later(now);
  if (!waiting_.empty() && reconnect_at_ <= now) connect(now);
}

// Each replica is tried once at once.
void Link::reconnect_later(Clock::time_point now) {
  active_ = (active_ + 1) % replicas_.size();
  reconnect_at_ = now;
  if (num_losses_ > replicas_.size())
    reconnect_at_ += std::min<Clock::duration>(
        kBackoff * (1 << std::min<size_t>(num_losses_ - replicas_.size() - 1, 8)),
        kLongestBackoff);
  if (is_recovering_ || waiting_.empty() || !can_recover()) return;
  note_loss(now);
}

void Link::note_loss(Clock::time_point now) {
  is_recovering_ = true;
  lost_at_ = now;
  news_->push_back({index_, {Failure::kLost, 0, loss_.text}});
}

void Link::give_up(Clock::time_point now) {
  disconnect();
  reconnect_at_ = now;
  fail_all({Failure::kGaveUp, milliseconds_between(lost_at_, now), loss_.text});
}

void Link::lose(Failure why, bool may_resend) {
  if (is_lost_) return;
  is_lost_ = true;
  may_resend_ = may_resend;
  loss_ = std::move(why);
  // An identity is no sentence.
  if (loss_.kind != Failure::kIdentity) loss_.text = named(loss_.text);
}

// What happened, and at which of several replicas.
std::string Link::named(const std::string& reason) const {
  if (replicas_.size() == 1) return reason;
  return replicas_[active_]->endpoint().name() + ": " + reason;
}

void Link::disconnect() {
  dialer().stop();
  connection_.reset();
  stream_ = 0;
  state_ = State::kDown;
}

// The first `num_sent` of those that wait were sent. Where a lost duck is not waited
// for, the others count too: it never proves itself.
void Link::fail_often_lost(size_t num_sent) {
  size_t num_counted = can_recover() ? num_sent : waiting_.size();
  for (size_t i = 0; i < num_counted; ++i)
    ++waiting_[i]->slots[size_t(index_)].num_losses;
  auto is_over = [this](const TicketRef& ticket) {
    if (ticket->slots[size_t(index_)].num_losses < kMaxSends) return false;
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

Clock::time_point Link::limit() const {
  if (!can_recover()) return kNever;
  if (in_flight_.empty() && waiting_.empty()) return kNever;
  if (is_recovering_)
    return std::min(lost_at_ + patience_->recover, patience_->give_up_at);
  // The first ones were sent first.
  const auto& oldest = in_flight_.empty() ? waiting_.front() : in_flight_.front();
  return oldest->slots[size_t(index_)].deadline;
}

Clock::time_point Link::on_time(Clock::time_point now) {
  if (now >= limit()) {
    if (is_recovering_) {
      give_up(now);
    } else {
      lose({Failure::kTimeout, 0, "it did not answer within deadline_s"}, true);
      settle(now);
    }
  }
  auto next = advance(now);
  return std::min(next, limit());
}

Clock::time_point Link::advance(Clock::time_point now) {
  if (state_ == State::kDown) {
    if (waiting_.empty()) return kNever;
    if (reconnect_at_ <= now) connect(now);
    if (state_ == State::kDown) return waiting_.empty() ? kNever : reconnect_at_;
  }
  if (state_ == State::kConnecting) {
    if (now < dialer().due()) return dialer().due();
    on_dialed(dialer().advance(now), now);
    return state_ == State::kConnecting ? dialer().due() : now;
  }
  if (in_flight_.empty() && (is_proven_ || waiting_.empty())) return kNever;
  if (connection_->num_received() != num_heard_) {
    num_heard_ = connection_->num_received();
    last_heard_ = now;
    is_pinged_ = false;
  }
  auto quiet = patience_->quiet;
  auto due = last_heard_ + (is_pinged_ ? quiet * 3 / 2 : quiet);
  if (now < due) return due;
  if (is_pinged_) {
    lose({Failure::kStatus, kStatusUnavailable, "it does not answer pings"}, true);
    settle(now);
    return now + milliseconds(1);
  }
  is_pinged_ = true;
  connection_->ping();
  flush(now);
  return now + quiet / 2;
}

void Link::close() {
  fail_all({Failure::kClosed, 0, "the client was closed"});
  disconnect();
}

}  // namespace duck::stream
