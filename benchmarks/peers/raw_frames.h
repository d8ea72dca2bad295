// What the yardsticks over TCP and over TLS share: their frames, and the sum.
//
// A request is two uint32, its size and the size of the reply, and its bytes; the reply
// is the first bytes of the request.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

struct Header {
  uint32_t size, reply_size;
};

inline void set_up(int socket) {
  int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// A socket that listens on a free port, which it prints.
inline int open_listener(in_addr_t listen_address) {
  int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = listen_address;
  bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address);
  listen(listener, 128);
  socklen_t length = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  return listener;
}

// A connected socket, or -1.
inline int connect_to(in_addr_t to, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = to;
  int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  if (connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0)
    return -1;
  set_up(socket);
  return socket;
}

inline float widened(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void set(
    const uint16_t* from, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = widened(from[i]);
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void add(
    const uint16_t* from, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] += widened(from[i]);
}
