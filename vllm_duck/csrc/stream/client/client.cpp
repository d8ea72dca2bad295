#include "stream/client/client.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace duck::stream {
namespace {

constexpr int kMaxEvents = 64;

// Another thread may have sent something meanwhile that needs a ping or a new
// connection: nobody sleeps longer than that.
constexpr auto kLongestPoll = std::chrono::milliseconds(1000);

int milliseconds_until(Clock::time_point then, Clock::time_point now) {
  if (then <= now) return 0;
  auto left = std::min<Clock::duration>(then - now, kLongestPoll);
  return int(std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

}  // namespace

Client::Client(const ClientOptions& options)
    : options_(options), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::runtime_error(strerror(errno));
  for (const auto& endpoint : options.endpoints)
    links_.push_back(std::make_unique<Link>(
        int(links_.size()), endpoint, options.identities[links_.size()],
        options.authorization, options.tls.get(), epoll_, &options_.patience, &news_));
}

Client::~Client() {
  links_.clear();
  ::close(epoll_);
}

TicketRef Client::start(const ForwardCall& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (num_in_flight_ == kMaxInFlight) return nullptr;
  auto ticket = std::make_shared<Ticket>();
  ticket->request_id = ++last_id_;
  ticket->request = encode_request(ticket->request_id, call, options_.reply_dtype);
  ticket->num_rows = call.num_rows;
  ticket->hidden_size = call.hidden_size;
  ticket->dtype = options_.reply_dtype;
  ticket->max_reply_bytes =
      size_t(call.num_rows) * call.hidden_size * element_bytes(ticket->dtype);
  ticket->start = Clock::now();
  const Patience& patience = options_.patience;
  ticket->deadline = patience.recover > Clock::duration::zero()
                         ? Clock::time_point::max()
                         : ticket->start + patience.deadline;
  ticket->slots.resize(links_.size());
  ticket->num_missing = int(links_.size());
  if (is_closed_) {
    ticket->fail(0, {Failure::kClosed, 0, "the client was closed"});
    return ticket;
  }
  ++num_in_flight_;
  try {
    for (auto& link : links_) link->start(ticket, ticket->start);
  } catch (...) {
    drop(ticket.get());
    throw;
  }
  return ticket;
}

bool Client::is_done(Ticket* ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!ticket->is_settled() && !is_polling_) poll(&lock, Clock::time_point::min());
  return ticket->is_settled() || Clock::now() >= ticket->deadline;
}

Client::Waited Client::wait(Ticket* ticket, News* news) {
  std::unique_lock<std::mutex> lock(mutex_);
  // What came while the caller did other things is in time, whenever it is looked at.
  if (!ticket->is_settled() && !is_polling_) poll(&lock, Clock::time_point::min());
  auto until = std::min(ticket->deadline, Clock::now() + kLongestPoll);
  while (!ticket->is_settled() && news_.empty()) {
    if (Clock::now() >= ticket->deadline) {
      time_out(ticket);
    } else if (Clock::now() >= until) {
      return Waited::kNotYet;
    } else if (is_polling_) {
      polled_.wait_until(lock, until);
    } else {
      poll(&lock, until);
    }
  }
  if (news_.empty()) return Waited::kSettled;
  *news = std::move(news_.front());
  news_.erase(news_.begin());
  return Waited::kNews;
}

void Client::begin_step(Clock::time_point give_up_at) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_.patience.give_up_at = give_up_at;
}

void Client::poll(std::unique_lock<std::mutex>* lock, Clock::time_point until) {
  auto now = Clock::now();
  auto next = until;
  if (until > now)
    for (auto& link : links_) next = std::min(next, link->on_time(now));
  epoll_event events[kMaxEvents];
  int timeout_ms = milliseconds_until(next, now);
  is_polling_ = true;
  if (timeout_ms > 0) lock->unlock();
  int count = ::epoll_wait(epoll_, events, kMaxEvents, timeout_ms);
  if (timeout_ms > 0) lock->lock();
  is_polling_ = false;
  // Also if an event finds no memory: the others must not sleep on.
  struct Notify {
    std::condition_variable* polled;
    ~Notify() { polled->notify_all(); }
  } notify = {&polled_};
  if (count > 0) {
    now = Clock::now();
    for (int i = 0; i < count; ++i)
      static_cast<Link*>(events[i].data.ptr)->on_event(events[i].events, now);
  }
}

void Client::time_out(Ticket* ticket) {
  auto late = std::find_if(ticket->slots.begin(), ticket->slots.end(),
                           [](const Slot& slot) { return !slot.is_done; });
  ticket->fail(int(late - ticket->slots.begin()), {Failure::kTimeout, 0, ""});
}

void Client::forget(Ticket* ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_closed_) drop(ticket);
}

void Client::drop(const Ticket* ticket) {
  --num_in_flight_;
  if (ticket->num_missing == 0) return;
  for (auto& link : links_) link->forget(ticket);
}

void Client::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  for (auto& link : links_) link->close();
}

std::vector<CallLog> Client::logs() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<CallLog> logs;
  for (auto& link : links_) logs.push_back(link->log());
  return logs;
}

}  // namespace duck::stream
