// A client's end of one duck: its connection, its Forward stream, what is in flight.
//
// A connection that breaks is replaced, and what was in flight is sent again under its
// old id: a duck keeps no state, so a request may be computed twice. A duck that cannot
// be connected to, or is late, is lost: it is tried again and again for as long as the
// Patience says, and its requests wait; with none they fail at once. Another duck than
// the one that the host was checked with always fails them at once: each stream opens
// with the duck's identity.
//
// A duck may have replicas, which hold the same slice: when one is lost, the next one
// in turn is the duck.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "stream/client/dialer.h"
#include "stream/connection.h"
#include "stream/ticket.h"

namespace duck::stream {

// Medians are taken over the latest calls.
struct CallTimes {
  uint32_t rtt_us, compute_us, queue_us;
};

class CallLog {
 public:
  void add(CallTimes times);
  uint64_t num_calls() const { return num_calls_; }
  const std::vector<CallTimes>& latest() const { return latest_; }

 private:
  static constexpr size_t kWindow = 4096;
  uint64_t num_calls_ = 0;
  std::vector<CallTimes> latest_;
};

// How long a client waits for its ducks.
struct Patience {
  // With a request in flight and nothing heard for that long, a duck is pinged; after
  // half of it again without a sound, the connection counts as lost.
  Clock::duration quiet;
  // For an answer, while the duck is connected.
  Clock::duration deadline;
  // For a lost duck; zero: its requests fail at once.
  Clock::duration recover;
  // For lost ducks, however short they have been lost.
  Clock::time_point give_up_at = Clock::time_point::max();
};

// What the host's log is to say of a duck.
struct News {
  int duck;
  Failure what;
};

class Link : private Connection::Owner {
 public:
  // `endpoints`: of the replicas, separated by |. `tls`, which is null
  // where bytes are plain, `patience` and `news` are the client's and outlive this.
  Link(int index, const std::string& endpoints, const std::string& identity,
       const std::string& authorization, TlsContext* tls, int epoll,
       const Patience* patience, std::vector<News>* news);
  ~Link() override;

  void start(const TicketRef& ticket, Clock::time_point now);
  // Nobody waits for it any more. A request that the duck never took costs it the
  // connection: it would block the ones behind it.
  void forget(const Ticket* ticket);
  void on_event(uint32_t events, Clock::time_point now);
  // Does what is due and says when to ask again.
  Clock::time_point on_time(Clock::time_point now);
  void close();
  const CallLog& log() const { return log_; }

 private:
  enum class State { kDown, kConnecting, kOpen };

  void connect(Clock::time_point now);
  void on_dialed(Dialer::Outcome outcome, Clock::time_point now);
  void connect_failed(const std::string& reason, Clock::time_point now);
  void on_connected(Clock::time_point now);
  std::unique_ptr<Tls> open_tls();
  void send_waiting(Clock::time_point now);
  void flush(Clock::time_point now);
  void settle(Clock::time_point now);
  void lose(Failure why, bool may_resend);
  void disconnect();
  void fail_often_lost(size_t num_sent);
  void fail_all(const Failure& why);
  bool can_recover() const { return patience_->recover > Clock::duration::zero(); }
  Dialer& dialer() { return *replicas_[active_]; }
  std::string named(const std::string& reason) const;
  void reconnect_later(Clock::time_point now);
  void note_loss(Clock::time_point now);
  void give_up(Clock::time_point now);
  Clock::time_point advance(Clock::time_point now);
  // When the duck is late, or has been lost for too long.
  Clock::time_point limit() const;
  void watch(bool wants_write);

  void on_headers(Stream* stream, bool is_last) override;
  size_t max_message_bytes(const Stream& stream) override;
  void on_message(Stream* stream, Message message) override;
  void on_refusal(Stream* stream, Connection::Refusal why) override;
  void on_half_close(Stream*) override {}
  void on_close(Stream* stream, uint32_t h2_error) override;
  void on_goaway() override;

  int index_;
  std::string identity_;
  Headers headers_;
  TlsContext* tls_;
  int epoll_;
  std::vector<std::unique_ptr<Dialer>> replicas_;
  size_t active_ = 0;
  const Patience* patience_;
  std::vector<News>* news_;
  State state_ = State::kDown;
  std::unique_ptr<Connection> connection_;
  int32_t stream_ = 0;
  // The stream has said that the right duck is behind it; nothing is sent before.
  bool is_proven_ = false;
  bool is_watching_writes_ = false;
  std::vector<TicketRef> in_flight_;
  size_t max_reply_bytes_ = 0;  // of all that this connection was sent
  std::deque<TicketRef> waiting_;
  // The duck takes no new calls on this connection; those in flight it still answers.
  bool is_leaving_ = false;
  // Set inside a callback, acted on once the connection has returned.
  bool is_lost_ = false;
  bool may_resend_ = false;
  Failure loss_{};
  size_t num_losses_ = 0;  // in a row, without an answer in between
  Clock::time_point reconnect_at_{};
  // Lost, with a request that waits, and not proven since.
  bool is_recovering_ = false;
  Clock::time_point lost_at_{};
  Clock::time_point last_heard_{};
  uint64_t num_heard_ = 0;
  bool is_pinged_ = false;
  CallLog log_;
};

}  // namespace duck::stream
