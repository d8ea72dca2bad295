// The yardstick of benchmarks/rpc.py: the same fan-out over bare TCP frames, with
// epoll, without HTTP/2, protobuf or checksums. Built by raw_tcp.py.
#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "raw_frames.h"

namespace {

// Bytes that may not fit into the socket at once.
struct Outgoing {
  Header header;
  const uint8_t* data;
  size_t done = 0;
  bool is_over() const { return done == sizeof header + header.size; }

  bool write(int socket) {
    while (!is_over()) {
      iovec parts[2];
      int count = 0;
      size_t in_data = done > sizeof header ? done - sizeof header : 0;
      if (done < sizeof header)
        parts[count++] = {reinterpret_cast<char*>(&header) + done,
                          sizeof header - done};
      parts[count++] = {const_cast<uint8_t*>(data) + in_data, header.size - in_data};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = size_t(count);
      ssize_t written = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0) return errno == EAGAIN;
      done += size_t(written);
    }
    return true;
  }
};

// One frame on its way in.
struct Incoming {
  Header header;
  std::vector<uint8_t> data;
  size_t done = 0;
  bool is_over() const {
    return done >= sizeof header && done == sizeof header + header.size;
  }

  bool read(int socket) {
    while (!is_over()) {
      ssize_t got;
      if (done == 0) {
        // Head and, if it is small, the whole of the data with one call.
        if (data.size() < 65536) data.resize(65536);
        iovec parts[2] = {{&header, sizeof header}, {data.data(), data.size()}};
        got = readv(socket, parts, 2);
      } else if (done < sizeof header) {
        got = recv(socket, reinterpret_cast<char*>(&header) + done,
                   sizeof header - done, 0);
      } else {
        if (data.size() < header.size) data.resize(header.size);
        size_t at = done - sizeof header;
        got = recv(socket, data.data() + at, header.size - at, 0);
      }
      if (got == 0) return false;
      if (got < 0) return errno == EAGAIN;
      done += size_t(got);
    }
    return true;
  }
};

void watch(int epoll, int operation, int socket, uint32_t events, uint32_t index) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = index;
  epoll_ctl(epoll, operation, socket, &event);
}

struct Client {
  int epoll;
  std::vector<int> sockets;
  std::vector<Incoming> replies;
};

}  // namespace

extern "C" {

// One connection to each address.
void* raw_connect(int num_ducks, const char* const* addresses, int port) {
  auto* client = new Client{epoll_create1(0), {}, {}};
  client->replies.resize(size_t(num_ducks));
  for (int i = 0; i < num_ducks; ++i) {
    int socket = connect_to(inet_addr(addresses[i]), port);
    if (socket < 0) return nullptr;
    fcntl(socket, F_SETFL, O_NONBLOCK);
    client->sockets.push_back(socket);
    watch(client->epoll, EPOLL_CTL_ADD, socket, EPOLLIN, uint32_t(i));
  }
  return client;
}

// Sends `size` bytes to all, waits for all replies and adds them up, in order.
int raw_call(void* handle, const uint8_t* data, uint32_t size, uint32_t reply_size,
             float* out) {
  auto* client = static_cast<Client*>(handle);
  size_t num_ducks = client->sockets.size(), num_missing = num_ducks;
  std::vector<Outgoing> requests(num_ducks, {{size, reply_size}, data});
  for (size_t i = 0; i < num_ducks; ++i) {
    client->replies[i].done = 0;
    if (!requests[i].write(client->sockets[i])) return -1;
    if (!requests[i].is_over())
      watch(client->epoll, EPOLL_CTL_MOD, client->sockets[i], EPOLLIN | EPOLLOUT,
            uint32_t(i));
  }
  epoll_event events[64];
  while (num_missing > 0) {
    int count = epoll_wait(client->epoll, events, 64, -1);
    for (int e = 0; e < count; ++e) {
      size_t i = events[e].data.u32;
      if (events[e].events & EPOLLOUT) {
        if (!requests[i].write(client->sockets[i])) return -1;
        if (requests[i].is_over())
          watch(client->epoll, EPOLL_CTL_MOD, client->sockets[i], EPOLLIN, uint32_t(i));
      }
      if (events[e].events & EPOLLIN) {
        if (!client->replies[i].read(client->sockets[i])) return -1;
        if (client->replies[i].is_over()) --num_missing;
      }
    }
  }
  // By blocks that stay in the cache, as the stream does.
  constexpr size_t kBlock = 8192;
  size_t total = reply_size / 2;
  for (size_t begin = 0; begin < total; begin += kBlock) {
    size_t block = total - begin < kBlock ? total - begin : kBlock;
    for (size_t i = 0; i < num_ducks; ++i) {
      auto* from =
          reinterpret_cast<const uint16_t*>(client->replies[i].data.data()) + begin;
      (i ? add : set)(from, block, out + begin);
    }
  }
  return 0;
}

void raw_close(void* handle) {
  auto* client = static_cast<Client*>(handle);
  for (int socket : client->sockets) close(socket);
  close(client->epoll);
  delete client;
}

// Serves for ever; prints its port.
void raw_serve(const char* listen_address) {
  int listener = open_listener(inet_addr(listen_address));
  struct Peer {
    int socket;
    Incoming in;
    Outgoing out;
    bool is_clogged;
  };
  std::vector<Peer> peers;
  int epoll = epoll_create1(0);
  constexpr uint32_t kListener = ~0u;
  watch(epoll, EPOLL_CTL_ADD, listener, EPOLLIN, kListener);
  epoll_event events[64];
  for (;;) {
    int count = epoll_wait(epoll, events, 64, -1);
    for (int e = 0; e < count; ++e) {
      uint32_t index = events[e].data.u32;
      if (index == kListener) {
        int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
        set_up(socket);
        peers.push_back({socket, {}, {}, false});
        watch(epoll, EPOLL_CTL_ADD, socket, EPOLLIN, uint32_t(peers.size() - 1));
        continue;
      }
      Peer& peer = peers[index];
      if (peer.out.done == 0 && !peer.in.read(peer.socket)) {
        close(peer.socket);
        continue;
      }
      if (!peer.in.is_over()) continue;
      if (peer.out.done == 0)
        peer.out = {{peer.in.header.reply_size, 0}, peer.in.data.data()};
      if (!peer.out.write(peer.socket)) {
        close(peer.socket);
        continue;
      }
      bool is_over = peer.out.is_over();
      if (peer.is_clogged == is_over)
        watch(epoll, EPOLL_CTL_MOD, peer.socket, is_over ? EPOLLIN : EPOLLOUT, index);
      peer.is_clogged = !is_over;
      if (is_over) peer.in.done = peer.out.done = 0;
    }
  }
}
}
