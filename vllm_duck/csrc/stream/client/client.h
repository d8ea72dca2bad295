// All ducks of a host: sends one request to each, waits for the replies, sums them.
//
// There is no thread in here. Whoever waits drives epoll for everybody; a second thread
// that waits meanwhile takes over when the first one is served.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "stream/client/link.h"

namespace duck::stream {

struct ClientOptions {
  std::vector<std::string> endpoints;
  std::vector<std::string> identities;  // of the ducks, see identity.py
  std::string authorization;            // empty: none
  std::shared_ptr<TlsContext> tls;      // null: plain
  Patience patience;
  DType reply_dtype;
};

class Client {
 public:
  explicit Client(const ClientOptions& options);
  ~Client();

  // Copies what `call` points to; its outputs are ignored. Null with more than
  // kMaxInFlight requests in flight.
  TicketRef start(const ForwardCall& call);
  // True once wait() would return at once.
  bool is_done(Ticket* ticket);
  enum class Waited { kSettled, kNews, kNotYet };
  // Waits until all ducks have answered, one has failed, or the deadline is over; but
  // returns at least once a second, and with the oldest news when there are any.
  Waited wait(Ticket* ticket, News* news);
  // From here on a duck that is lost after `give_up_at` fails its requests at once, and
  // one that is lost then fails them at that time.
  void begin_step(Clock::time_point give_up_at);
  // The ticket's holder goes: late replies to it are dropped.
  void forget(Ticket* ticket);
  void close();

  std::vector<CallLog> logs();

  static constexpr size_t kMaxInFlight = 64;

 private:
  // All expect the lock to be held, and poll() gives it up while it waits.
  void poll(std::unique_lock<std::mutex>* lock, Clock::time_point until);
  void time_out(Ticket* ticket);
  void drop(const Ticket* ticket);

  ClientOptions options_;
  std::mutex mutex_;
  std::condition_variable polled_;
  bool is_polling_ = false;
  bool is_closed_ = false;
  int epoll_;
  uint64_t last_id_ = 0;
  size_t num_in_flight_ = 0;
  std::vector<News> news_;
  std::vector<std::unique_ptr<Link>> links_;
};

// The sum of a settled ticket's partials [T][H] in fp32 and in duck order, which makes
// it independent of the order of arrival.
void sum_partials(const Ticket& ticket, float* out);

}  // namespace duck::stream
