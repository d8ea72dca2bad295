// Many ducks in one thread: the server's side of the native stream, and a timer in
// place of a kernel. A reply leaves when its duck would have computed it; no thread
// sleeps for it. Built by ducks.py, with the stream's own sources.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "stream/endpoint.h"
#include "stream/server/peer.h"

namespace {

using duck::stream::Clock;
using duck::stream::Connection;
using duck::stream::ControlEvent;
using duck::stream::Headers;
using duck::stream::Job;
using duck::stream::make_payload;
using duck::stream::PayloadRef;
using duck::stream::Peer;
using duck::stream::ReplyWriter;
using duck::stream::Share;
using duck::stream::Status;

constexpr size_t kMaxMessageBytes = 256 << 20;
constexpr int kPeerLostS = 30;
// Keys of epoll events: the timer, listeners by duck, then peers.
constexpr uint64_t kTimerKey = 0;
constexpr uint64_t kFirstListenerKey = 1;
constexpr uint64_t kFirstPeerKey = 1 << 16;

// As ducks.py writes it, in shared memory.
struct Pace {
  double row_s, flops_s, wire_s;
};

Clock::duration service_of(const volatile Pace& pace, uint32_t num_rows) {
  // Of 256 experts each row takes 8; rows choose independently.
  double num_experts = 32 * (1 - std::pow(31.0 / 32, num_rows));
  double seconds = std::max(pace.row_s * num_experts, pace.flops_s * num_rows) +
                   pace.wire_s * num_rows;
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

uint32_t microseconds(Clock::duration time) {
  return uint32_t(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

// One of the ducks: what its peers ask it, and until when it is busy.
class PacedDuck : public Peer::Owner {
 public:
  PacedDuck(std::string identity, std::string info)
      : identity_(std::move(identity)), info_(std::move(info)) {}

  Clock::time_point free_at{};

 private:
  Status admit(Peer* peer, const std::string&, const Headers&) override {
    if (!peer->is_host()) peer->become_host(std::make_shared<Share>());
    ++peer->share()->num_calls;
    return {};
  }
  void call_ended(bool) override {}
  uint64_t control_call(Peer* peer, int32_t stream_id) override {
    calls_[++last_call_] = {peer, stream_id};
    return last_call_;
  }
  // There is no method but Describe.
  void control_event(ControlEvent event) override {
    auto found = calls_.find(event.call_id);
    if (found == calls_.end()) return;
    auto [peer, stream_id] = found->second;
    if (event.kind == ControlEvent::kGone) {
      calls_.erase(found);
    } else if (event.kind == ControlEvent::kMessage) {
      peer->send(stream_id, make_payload(info_.data(), info_.size()));
      peer->finish(stream_id, {});
    }
  }
  size_t max_message_bytes() const override { return kMaxMessageBytes; }
  const std::string& identity() const override { return identity_; }

  std::string identity_, info_;
  uint64_t last_call_ = 0;
  std::unordered_map<uint64_t, std::pair<Peer*, int32_t>> calls_;
};

struct Guest {
  PacedDuck* duck;
  std::unique_ptr<Peer> peer;
};

// A reply on its way.
struct Due {
  uint64_t peer_id;
  int32_t stream_id;
  PayloadRef reply;
};

class Pond {
 public:
  explicit Pond(const volatile Pace* pace) : pace_(pace) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    timer_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(EPOLL_CTL_ADD, timer_, kTimerKey, EPOLLIN);
  }

  void add(int listener, std::string identity, std::string info) {
    watch(EPOLL_CTL_ADD, listener, kFirstListenerKey + ducks_.size(), EPOLLIN);
    listeners_.push_back(listener);
    ducks_.push_back(std::make_unique<PacedDuck>(std::move(identity), std::move(info)));
  }

  [[noreturn]] void serve() {
    for (;;) {
      epoll_event events[64];
      int count = ::epoll_wait(epoll_, events, 64, -1);
      for (int i = 0; i < count; ++i)
        on_readiness(events[i].data.u64, events[i].events);
      send_due();
    }
  }

 private:
  void watch(int operation, int fd, uint64_t key, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    ::epoll_ctl(epoll_, operation, fd, &event);
  }

  void on_readiness(uint64_t key, uint32_t events) {
    if (key == kTimerKey) {
      uint64_t count;
      (void)!::read(timer_, &count, sizeof count);
      return;
    }
    if (key < kFirstPeerKey) return accept_from(size_t(key - kFirstListenerKey));
    auto found = guests_.find(key);
    if (found == guests_.end()) return;
    Connection& connection = found->second.peer->connection();
    bool is_alive = true;
    if (events & ~uint32_t(EPOLLOUT)) is_alive = connection.receive();
    if (is_alive) take_jobs(&found->second);
    after_io(found->second.peer.get(), is_alive && connection.flush());
  }

  void accept_from(size_t duck_idx) {
    int socket =
        ::accept4(listeners_[duck_idx], nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) return;
    duck::stream::tune_socket(socket, kPeerLostS);
    uint64_t id = ++last_peer_id_;
    PacedDuck* owner = ducks_[duck_idx].get();
    Peer::Owner* as_owner = owner;
    guests_[id] = {owner, std::make_unique<Peer>(id, socket, nullptr, as_owner)};
    watch(EPOLL_CTL_ADD, socket, id, EPOLLIN);
    Peer* peer = guests_[id].peer.get();
    after_io(peer, peer->connection().flush());
  }

  // Replies are made at once, so that making them is no part of the pace.
  void take_jobs(Guest* guest) {
    while (guest->peer->has_job()) {
      std::unique_ptr<Job> job = guest->peer->take_job();
      if (!job) continue;
      auto start = std::max(job->arrival, guest->duck->free_at);
      auto service = service_of(*pace_, job->request.num_rows);
      guest->duck->free_at = start + service;
      bool is_fp32 = job->request.dtype() == duck::stream::DType::kF32;
      ReplyWriter reply(job->request);
      std::memset(reply.partial(), 0,
                  size_t(job->request.num_rows) * job->request.hidden_size *
                      (is_fp32 ? sizeof(float) : sizeof(uint16_t)));
      dues_.emplace(start + service, Due{job->peer_id, job->stream_id,
                                         reply.seal(microseconds(start - job->arrival),
                                                    microseconds(service))});
    }
  }

  void send_due() {
    while (!dues_.empty() && dues_.begin()->first <= Clock::now()) {
      Due due = std::move(dues_.begin()->second);
      dues_.erase(dues_.begin());
      auto found = guests_.find(due.peer_id);
      if (found == guests_.end()) continue;
      Peer* peer = found->second.peer.get();
      peer->deliver(due.stream_id, std::move(due.reply));
      after_io(peer, peer->connection().flush());
    }
    if (dues_.empty()) return;
    auto since_epoch = std::chrono::duration_cast<std::chrono::nanoseconds>(
        dues_.begin()->first.time_since_epoch());
    itimerspec spec{};
    spec.it_value.tv_sec = time_t(since_epoch.count() / 1000000000);
    spec.it_value.tv_nsec = long(since_epoch.count() % 1000000000);
    ::timerfd_settime(timer_, TFD_TIMER_ABSTIME, &spec, nullptr);
  }

  void after_io(Peer* peer, bool is_alive) {
    if (!is_alive) {
      guests_.erase(peer->id());
      return;
    }
    uint32_t events = EPOLLIN;
    if (peer->connection().is_clogged()) events |= EPOLLOUT;
    if (events == peer->watched_events) return;
    peer->watched_events = events;
    watch(EPOLL_CTL_MOD, peer->connection().socket(), peer->id(), events);
  }

  const volatile Pace* pace_;
  int epoll_, timer_;
  std::vector<int> listeners_;
  std::vector<std::unique_ptr<PacedDuck>> ducks_;
  uint64_t last_peer_id_ = kFirstPeerKey;
  std::multimap<Clock::time_point, Due> dues_;
  std::unordered_map<uint64_t, Guest> guests_;
};

}  // namespace

extern "C" {

void* pond_new(const void* pace) {
  return new Pond(static_cast<const volatile Pace*>(pace));
}

void pond_add(void* pond, int listener, const char* identity, const char* info,
              size_t info_bytes) {
  static_cast<Pond*>(pond)->add(listener, identity, std::string(info, info_bytes));
}

// For ever.
void pond_serve(void* pond) { static_cast<Pond*>(pond)->serve(); }

}  // extern "C"
