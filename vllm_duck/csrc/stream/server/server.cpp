#include "stream/server/server.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <new>
#include <stdexcept>

#include "stream/endpoint.h"

namespace duck::stream {
namespace {

constexpr int kMaxEvents = 64;
// Decode steps and small prompts: milliseconds of compute at most.
constexpr uint32_t kMaxInlineRows = 64;
constexpr int kPeerLostS = 30;
// Hosts that have received everything have this long to close their connections.
constexpr auto kGoodbye = std::chrono::milliseconds(200);

// Keys of epoll events: the eventfd, listeners by index, then peers by id.
constexpr uint64_t kWakeKey = 0;
constexpr uint64_t kFirstListenerKey = 1;
constexpr uint64_t kFirstPeerKey = 1 << 16;

void watch(int epoll, int operation, int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  ::epoll_ctl(epoll, operation, fd, &event);
}

}  // namespace

Server::Server(const ServerOptions& options)
    : options_(options), turns_(kMaxInlineRows), last_peer_id_(kFirstPeerKey) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error(strerror(errno));
  watch(epoll_, EPOLL_CTL_ADD, wake_, kWakeKey, EPOLLIN);
  listeners_ =
      std::make_unique<Listeners>(options.listeners, epoll_, kFirstListenerKey);
}

Server::~Server() {
  stop(0);
  peers_.clear();
  listeners_->close();
  ::close(wake_);
  ::close(epoll_);
}

void Server::start() {
  thread_ = std::thread([this] { serve(); });
  compute_thread_ = std::thread([this] { compute_long_jobs(); });
}

void Server::stop(double grace_s) {
  if (thread_.joinable()) {
    auto give_up = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(grace_s));
    post([this, give_up] { begin_drain(give_up); });
    thread_.join();
    {
      std::lock_guard<std::mutex> lock(job_mutex_);
      is_compute_over_ = true;
    }
    job_ready_.notify_all();
    if (compute_thread_.joinable()) compute_thread_.join();
  }
  std::lock_guard<std::mutex> lock(events_mutex_);
  are_events_over_ = true;
  event_ready_.notify_all();
}

bool Server::next_event(ControlEvent* event) {
  std::unique_lock<std::mutex> lock(events_mutex_);
  event_ready_.wait(lock, [this] { return are_events_over_ || !events_.empty(); });
  if (events_.empty()) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  return true;
}

void Server::send(uint64_t call_id, PayloadRef message) {
  post([this, call_id, message = std::move(message)] {
    with_control_call(call_id, [&](Peer* peer, int32_t stream_id) {
      peer->send(stream_id, message);
    });
  });
}

void Server::finish(uint64_t call_id, Status status) {
  post([this, call_id, status = std::move(status)] {
    with_control_call(call_id, [&](Peer* peer, int32_t stream_id) {
      peer->finish(stream_id, status);
    });
  });
}

void Server::with_control_call(uint64_t call_id,
                               const std::function<void(Peer*, int32_t)>& act) {
  auto call = control_calls_.find(call_id);
  if (call == control_calls_.end()) return;
  auto [peer_id, stream_id] = call->second;
  auto found = peers_.find(peer_id);
  if (found == peers_.end()) return;
  Peer* peer = found->second.get();
  peer_at_work_ = peer_id;
  act(peer, stream_id);
  after_io(peer, peer->connection().flush());
}

void Server::serve() {
  while (!is_drained()) {
    epoll_event events[kMaxEvents];
    int timeout_ms = turns_.has_next() ? 0 : is_draining_ ? 10 : -1;
    if (timeout_ms < 0)
      timeout_ms = listeners_->is_resting() ? Listeners::kRestMs : strangers_.wait_ms();
    int count = ::epoll_wait(epoll_, events, kMaxEvents, timeout_ms);
    for (int i = 0; i < count; ++i) {
      survive([&] { on_readiness(events[i].data.u64, events[i].events); });
      // At once: the other hosts' requests are no reason for this one to wait.
      survive([&] { compute_next(); });
    }
    if (count <= 0) survive([&] { compute_next(); });
    if (listeners_->is_resting()) listeners_->wake(Clock::now());
    drop_late_strangers();
  }
  for (auto& [id, socket] : leaving_) ::close(socket);
  leaving_.clear();
  peers_.clear();
  listeners_->close();
}

// Where there is no memory, the connection at work is lost and not the duck.
template <class Work>
void Server::survive(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    drop(peer_at_work_);
  }
}

void Server::on_readiness(uint64_t key, uint32_t events) {
  peer_at_work_ = key;
  if (key == kWakeKey) return run_posted();
  if (key < kFirstPeerKey) return accept_from(key);
  auto left = leaving_.find(key);
  if (left != leaving_.end() && is_left(left->second)) leaving_.erase(left);
  auto found = peers_.find(key);
  if (found == peers_.end()) return;
  Connection& connection = found->second->connection();
  bool is_alive = true;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) is_alive = connection.receive();
  if (is_alive && (events & EPOLLOUT)) is_alive = connection.flush();
  after_io(found->second.get(), is_alive);
}

void Server::accept_from(uint64_t listener_key) {
  std::string notice;
  int socket = listeners_->accept(listener_key, &notice);
  if (!notice.empty()) control_event({0, ControlEvent::kNotice, notice, Message()});
  if (socket < 0) return;
  if (strangers_.is_full()) drop(strangers_.oldest());
  if (peers_.size() >= kMaxPeers) {
    ::close(socket);
    return;
  }
  tune_socket(socket, kPeerLostS);
  uint64_t id = ++last_peer_id_;
  std::unique_ptr<Peer> peer;
  try {
    peer =
        std::make_unique<Peer>(id, socket, open_tls(), static_cast<Peer::Owner*>(this));
  } catch (const std::bad_alloc&) {
    ::close(socket);
    return;
  }
  watch(epoll_, EPOLL_CTL_ADD, socket, id, EPOLLIN);
  Peer* added = (peers_[id] = std::move(peer)).get();
  strangers_.add(id, Clock::now());
  after_io(added, added->connection().flush());
}

std::unique_ptr<Tls> Server::open_tls() {
  if (!options_.tls) return nullptr;
  auto tls = options_.tls->open("");
  std::string notice = options_.tls->take_notice();
  if (!notice.empty()) control_event({0, ControlEvent::kStaleTls, notice, Message()});
  return tls;
}

void Server::after_io(Peer* peer, bool is_alive) {
  uint64_t id = peer->id();
  if (!is_alive) {
    if (is_draining_ && peer->connection().is_finished()) leave(peer);
    drop(id);
    listeners_->end_rest();  // a descriptor is free
    return;
  }
  queue(peer);
  peer->charge();
  uint32_t events = EPOLLIN;
  if (peer->connection().is_clogged()) events |= EPOLLOUT;
  if (events == peer->watched_events) return;
  peer->watched_events = events;
  watch(epoll_, EPOLL_CTL_MOD, peer->connection().socket(), id, events);
}

void Server::drop(uint64_t peer_id) {
  peers_.erase(peer_id);
  turns_.forget(peer_id);
  strangers_.forget(peer_id);
}

void Server::drop_late_strangers() {
  strangers_.each_late(Clock::now(), [this](uint64_t id) {
    if (peers_.at(id)->num_calls() == 0) drop(id);
  });
}

void Server::post(Task task) {
  {
    std::lock_guard<std::mutex> lock(posted_mutex_);
    posted_.push_back(std::move(task));
  }
  wake();
}

void Server::wake() {
  uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

void Server::run_posted() {
  uint64_t count;
  (void)!::read(wake_, &count, sizeof count);
  std::vector<Task> tasks;
  {
    std::lock_guard<std::mutex> lock(posted_mutex_);
    tasks.swap(posted_);
  }
  for (auto& task : tasks) survive(task);
  std::unique_ptr<Job> done;
  {
    std::lock_guard<std::mutex> lock(job_mutex_);
    done = std::move(done_job_);
  }
  if (!done) return;
  turns_.end_long();
  deliver(done.get());
}

void Server::begin_drain(Clock::time_point give_up) {
  if (is_draining_) return;
  is_draining_ = true;
  give_up_ = give_up;
  listeners_->close();
  std::vector<Peer*> peers;
  for (auto& [id, peer] : peers_) peers.push_back(peer.get());
  for (Peer* peer : peers) {
    // What is in the socket has arrived too.
    bool is_alive = peer->connection().receive();
    if (is_alive) peer->drain();
    after_io(peer, is_alive && peer->connection().flush());
  }
}

// Leaves it to the host to close the connection: a TCP socket that is closed with bytes
// unread, or that bytes still come to, is reset, and what the host's machine has not
// taken by then is lost.
void Server::leave(Peer* peer) {
  int socket = peer->connection().release_socket();
  ::shutdown(socket, SHUT_WR);
  watch(epoll_, EPOLL_CTL_MOD, socket, peer->id(), EPOLLIN);
  leaving_[peer->id()] = socket;
}

// Drops what comes; true once the host has closed the connection.
bool Server::is_left(int socket) {
  char dropped[4096];
  ssize_t size = ::recv(socket, dropped, sizeof dropped, 0);
  if (size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR))) return false;
  ::close(socket);
  return true;
}

// Whether nothing is left to do, or no time to do it.
bool Server::is_drained() {
  if (!is_draining_) return false;
  auto now = Clock::now();
  if ((peers_.empty() && leaving_.empty()) || now >= give_up_) return true;
  bool is_busy = false;
  for (auto& [id, peer] : peers_)
    is_busy |= peer->has_forward_calls() || peer->connection().is_clogged();
  for (auto& [id, socket] : leaving_) is_busy |= has_unacknowledged_bytes(socket);
  if (is_busy || goodbye_ == Clock::time_point{}) goodbye_ = now + kGoodbye;
  return now >= goodbye_;
}

// Computes one request, or hands it to the other thread; then it is the next host's
// turn.
void Server::compute_next() {
  uint64_t id = turns_.take();
  auto found = peers_.find(id);
  if (found == peers_.end()) return;
  peer_at_work_ = id;
  Peer* peer = found->second.get();
  peer->is_queued = false;
  if (!peer->has_job()) return;
  std::unique_ptr<Job> job = peer->take_job();
  turns_.begin(id, job->request.num_rows);
  job->is_long = turns_.is_long(job->request.num_rows);
  queue(peer);
  if (!job->is_long) {
    answer(options_.compute, job.get());
    return deliver(job.get());
  }
  {
    std::lock_guard<std::mutex> lock(job_mutex_);
    long_job_ = std::move(job);
  }
  job_ready_.notify_one();
}

void Server::queue(Peer* peer) {
  if (peer->is_queued || !peer->has_job()) return;
  turns_.ask(peer->id(), peer->next_rows());
  peer->is_queued = true;
}

void Server::deliver(Job* job) {
  auto found = peers_.find(job->peer_id);
  if (found == peers_.end()) return;
  peer_at_work_ = job->peer_id;
  Peer* peer = found->second.get();
  peer->deliver(job->stream_id, std::move(job->reply));
  after_io(peer, peer->connection().flush());
}

void Server::compute_long_jobs() {
  for (;;) {
    std::unique_ptr<Job> job;
    {
      std::unique_lock<std::mutex> lock(job_mutex_);
      job_ready_.wait(lock, [this] { return is_compute_over_ || long_job_; });
      if (!long_job_) return;
      job = std::move(long_job_);
    }
    answer(options_.compute, job.get());
    {
      std::lock_guard<std::mutex> lock(job_mutex_);
      done_job_ = std::move(job);
    }
    wake();
  }
}

uint64_t Server::control_call(Peer* peer, int32_t stream_id) {
  uint64_t call_id = ++last_call_id_;
  control_calls_[call_id] = {peer->id(), stream_id};
  return call_id;
}

void Server::control_event(ControlEvent event) {
  if (event.kind == ControlEvent::kGone) control_calls_.erase(event.call_id);
  std::lock_guard<std::mutex> lock(events_mutex_);
  events_.push_back(std::move(event));
  event_ready_.notify_one();
}

bool Server::is_control_behind() {
  std::lock_guard<std::mutex> lock(events_mutex_);
  return events_.size() >= kMaxControlEvents;
}

}  // namespace duck::stream
