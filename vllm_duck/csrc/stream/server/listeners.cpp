#include "stream/server/listeners.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

namespace duck::stream {

Listeners::Listeners(std::vector<int> sockets, int epoll, uint64_t first_key)
    : sockets_(std::move(sockets)), epoll_(epoll), first_key_(first_key) {
  watch(EPOLL_CTL_ADD);
}

int Listeners::accept(uint64_t key, std::string* notice) {
  if (sockets_.empty()) return -1;
  int listener = sockets_[size_t(key - first_key_)];
  int socket = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (socket >= 0) return socket;
  bool is_out =
      errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  if (!is_out || is_resting_) return -1;
  if (!std::exchange(is_told_, true)) *notice = strerror(errno);
  is_resting_ = true;
  wake_at_ = Clock::now() + std::chrono::milliseconds(kRestMs);
  watch(EPOLL_CTL_DEL);
  return -1;
}

void Listeners::wake(Clock::time_point now) {
  if (!is_resting_ || now < wake_at_) return;
  is_resting_ = false;
  watch(EPOLL_CTL_ADD);
}

void Listeners::close() {
  for (int socket : sockets_) ::close(socket);
  sockets_.clear();
}

void Listeners::watch(int operation) {
  for (size_t i = 0; i < sockets_.size(); ++i) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = first_key_ + i;
    ::epoll_ctl(epoll_, operation, sockets_[i], &event);
  }
}

}  // namespace duck::stream
