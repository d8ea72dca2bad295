#include "stream/client/dialer.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace duck::stream {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(250);
// Of the address that was tried last.
constexpr auto kConnectTime = std::chrono::seconds(5);

// 0 once it is connected, EINPROGRESS before, or why it is not.
int error_of(int socket) {
  pollfd writable = {socket, POLLOUT, 0};
  if (::poll(&writable, 1, 0) <= 0) return EINPROGRESS;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

Dialer::Dialer(const std::string& endpoint, int epoll, void* owner)
    : endpoint_(endpoint), epoll_(epoll), owner_(owner) {}

Dialer::~Dialer() { stop(); }

Dialer::Outcome Dialer::start(Clock::time_point now) {
  stop();
  error_.clear();
  num_tried_ = 0;
  addresses_ = endpoint_.addresses(&error_);
  return dial_on(now);
}

Dialer::Outcome Dialer::advance(Clock::time_point now) {
  if (find_connected()) return Outcome::kConnected;
  if (num_tried_ == addresses_.size() && now >= give_up_at_) {
    error_ = "no connection within 5 s";
    stop();
  }
  return dial_on(now);
}

Clock::time_point Dialer::due() const {
  return num_tried_ < addresses_.size() ? next_at_ : give_up_at_;
}

int Dialer::take_socket() {
  int socket = sockets_.front();
  sockets_.erase(sockets_.begin());
  stop();
  return socket;
}

void Dialer::stop() {
  for (int socket : sockets_) ::close(socket);  // which takes it out of epoll
  sockets_.clear();
}

// Drops those that have failed.
bool Dialer::find_connected() {
  for (size_t i = 0; i < sockets_.size();) {
    int error = error_of(sockets_[i]);
    if (error == 0) {
      std::swap(sockets_[0], sockets_[i]);
      return true;
    }
    if (error == EINPROGRESS) {
      ++i;
      continue;
    }
    error_ = strerror(error);
    ::close(sockets_[i]);
    sockets_.erase(sockets_.begin() + std::ptrdiff_t(i));
  }
  return false;
}

Dialer::Outcome Dialer::dial_on(Clock::time_point now) {
  while (num_tried_ < addresses_.size() && (sockets_.empty() || now >= next_at_)) {
    dial(addresses_[num_tried_++]);
    next_at_ = now + kPatience;
    give_up_at_ = now + kConnectTime;
  }
  return sockets_.empty() ? Outcome::kFailed : Outcome::kPending;
}

void Dialer::dial(const Endpoint::Address& address) {
  int socket =
      ::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket < 0) {
    error_ = strerror(errno);
    return;
  }
  auto* bytes = reinterpret_cast<const sockaddr*>(&address.bytes);
  if (::connect(socket, bytes, address.size) != 0 && errno != EINPROGRESS) {
    error_ = strerror(errno);
    ::close(socket);
    return;
  }
  epoll_event event{};
  event.events = EPOLLOUT;
  event.data.ptr = owner_;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event);
  sockets_.push_back(socket);
}

}  // namespace duck::stream
