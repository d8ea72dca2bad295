// One host's connection to a duck: its calls, and the requests that wait.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "stream/connection.h"
#include "stream/server/job.h"
#include "stream/server/shares.h"

namespace duck::stream {

constexpr const char* kForwardPath = "/duck.v1.Duck/Forward";

// Something that happened to a call of another method than Forward.
struct ControlEvent {
  // kNotice is of no call: why the server takes no connection for now.
  // kStaleTls: why files of TLS that have changed are not used.
  enum Kind {
    kStart = 0,
    kMessage = 1,
    kHalfClose = 2,
    kGone = 3,
    kNotice = 4,
    kStaleTls = 5
  };
  uint64_t call_id;
  Kind kind;
  std::string method;  // or the notice
  Message message;
};

class Peer : private Connection::Owner {
 public:
  // What all peers of a server share.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Whether a call that starts now is let in; its status says why not.
    virtual Status admit(Peer* peer, const std::string& method,
                         const Headers& headers) = 0;
    virtual void call_ended(bool was_counted) = 0;
    virtual uint64_t control_call(Peer* peer, int32_t stream_id) = 0;
    virtual void control_event(ControlEvent event) = 0;
    virtual size_t max_message_bytes() const = 0;
    virtual const std::string& identity() const = 0;
  };

  Peer(uint64_t id, int socket, std::unique_ptr<Tls> tls, Owner* owner);
  ~Peer() override;

  uint64_t id() const { return id_; }
  Connection& connection() { return connection_; }

  // A request waits, and the host reads its replies.
  bool has_job() const;
  uint32_t next_rows() const { return waiting_.front()->request.num_rows; }
  // The oldest request that waits; its reply comes through deliver().
  std::unique_ptr<Job> take_job();
  void deliver(int32_t stream_id, PayloadRef reply);
  // For a control call.
  void send(int32_t stream_id, PayloadRef message);
  void finish(int32_t stream_id, const Status& status);

  // Takes no further request; calls end with what has arrived.
  void drain();
  // For the server: what epoll was told last, and whether a turn is on its way.
  uint32_t watched_events = 0;
  bool is_queued = false;

  // Not a stranger: a call has been let in that needs the token, if there is one.
  bool is_host() const { return share_ != nullptr; }
  void become_host(ShareRef share);
  // Only of a host.
  Share* share() { return share_.get(); }
  // Tells the share what this connection holds of it now.
  void charge();

  bool has_forward_calls() const { return num_forward_calls_ > 0; }
  size_t num_calls() const { return calls_.size(); }

 private:
  struct Call {
    bool is_forward;
    bool is_counted;  // among the calls of hosts
    uint64_t control_id;
    size_t num_waiting = 0;
    size_t waiting_bytes = 0;
    size_t num_computing = 0;
    bool is_last_request_in = false;
  };

  size_t in_flight_bytes();
  void end_call(const Call& call);
  void hold_or_reopen(Stream* stream, const Call& call);
  void end_if_answered(Stream* stream, const Call& call);

  void on_headers(Stream* stream, bool is_last) override;
  size_t max_message_bytes(const Stream& stream) override;
  void on_message(Stream* stream, Message message) override;
  void on_refusal(Stream* stream, Connection::Refusal why) override;
  void on_half_close(Stream* stream) override;
  void on_close(Stream* stream, uint32_t h2_error) override;
  void on_goaway() override {}

  uint64_t id_;
  Owner* owner_;
  ShareRef share_;
  size_t charged_bytes_ = 0;
  std::unordered_map<int32_t, Call> calls_;
  std::deque<std::unique_ptr<Job>> waiting_;
  size_t num_forward_calls_ = 0;
  Connection connection_;  // last: its end calls back
};

}  // namespace duck::stream
