// A duck's listener: Forward runs in here from the first byte to the last; every other
// method of the endpoint is handed out as events, for Python to answer.
//
// One thread serves all connections. It computes calls of few rows itself, which spares
// them two thread switches, and gives longer ones to a second thread, so that pings and
// health checks are answered meanwhile. Hosts take turns by rows, and a long call stops
// between two units of its work for the short calls of other hosts.
//
// Connections that have not shown the token yet have a small share: see Strangers.
//
// Held at most, of requests and replies: a share for each address (see shares.h), of
// which a call has as many requests that wait as 64, or one message's limit, then
// HTTP/2 flow control makes the host wait; and a connection replies of 64 MiB, then its
// requests wait. What was held is kept for the next messages, up to Block::kMaxKept.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stream/server/listeners.h"
#include "stream/server/peer.h"
#include "stream/server/shares.h"
#include "stream/server/strangers.h"
#include "stream/server/turns.h"

namespace duck::stream {

// So many hosts find calls free whatever one of them does.
constexpr size_t kMinHosts = 4;
constexpr size_t kMaxPeers = 256;
// Of calls that Python answers; more are refused until it has caught up.
constexpr size_t kMaxControlEvents = 1024;

struct ServerOptions {
  std::vector<int> listeners;  // taken over
  Compute compute;
  std::string authorization;  // what callers must send; empty: nothing
  std::string identity;
  size_t max_message_bytes;
  size_t max_calls;
  std::shared_ptr<TlsContext> tls;  // null: plain
};

class Server : private Peer::Owner {
 public:
  explicit Server(const ServerOptions& options);
  ~Server() override;

  void start();
  // Refuses new calls, answers what has arrived, and closes within `grace_s`.
  void stop(double grace_s);

  // Waits for the next event; false when the server has stopped.
  bool next_event(ControlEvent* event);
  // For a call of a control event; nothing happens if it is gone.
  void send(uint64_t call_id, PayloadRef message);
  void finish(uint64_t call_id, Status status);

 private:
  using Task = std::function<void()>;

  void serve();
  void on_readiness(uint64_t key, uint32_t events);
  void accept_from(uint64_t listener_key);
  std::unique_ptr<Tls> open_tls();
  void post(Task task);
  void wake();
  void run_posted();
  void begin_drain(Clock::time_point give_up);
  void leave(Peer* peer);
  bool is_left(int socket);
  bool is_drained();
  void with_control_call(uint64_t call_id,
                         const std::function<void(Peer*, int32_t)>& act);

  void queue(Peer* peer);
  void compute_next();
  void deliver(Job* job);
  void compute_long_jobs();

  void after_io(Peer* peer, bool is_alive);
  void drop(uint64_t peer_id);
  void drop_late_strangers();
  template <class Work>
  void survive(const Work& work);

  Status admit(Peer* peer, const std::string& method, const Headers& headers) override;
  void call_ended(bool was_counted) override { num_calls_ -= was_counted; }
  Status admit_host(Peer* peer);
  Status admit_call(Peer* peer);
  bool is_control_behind();
  uint64_t control_call(Peer* peer, int32_t stream_id) override;
  void control_event(ControlEvent event) override;
  size_t max_message_bytes() const override { return options_.max_message_bytes; }
  const std::string& identity() const override { return options_.identity; }

  ServerOptions options_;
  int epoll_ = -1;
  int wake_ = -1;  // eventfd: something was posted
  std::thread thread_;
  std::thread compute_thread_;

  std::mutex posted_mutex_;
  std::vector<Task> posted_;

  // Of the serving thread alone.
  std::unique_ptr<Listeners> listeners_;
  std::unordered_map<uint64_t, std::unique_ptr<Peer>> peers_;
  uint64_t peer_at_work_ = 0;
  Turns turns_;
  Strangers strangers_;
  Shares shares_;
  size_t num_calls_ = 0;  // of hosts
  uint64_t last_peer_id_ = 0;
  uint64_t last_call_id_ = 0;
  std::unordered_map<uint64_t, std::pair<uint64_t, int32_t>> control_calls_;
  // While draining: sockets of peers to whom all is said, by the peers' ids.
  std::unordered_map<uint64_t, int> leaving_;
  bool is_draining_ = false;
  Clock::time_point give_up_{};
  Clock::time_point goodbye_{};

  std::mutex job_mutex_;
  std::condition_variable job_ready_;
  std::unique_ptr<Job> long_job_;
  std::unique_ptr<Job> done_job_;
  bool is_compute_over_ = false;

  std::mutex events_mutex_;
  std::condition_variable event_ready_;
  std::deque<ControlEvent> events_;
  bool are_events_over_ = false;
};

}  // namespace duck::stream
