#include "stream/endpoint.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace duck::stream {
namespace {

constexpr const char* kUnixPrefix = "unix:";

bool is_unix(const std::string& name) { return name.rfind(kUnixPrefix, 0) == 0; }

void set_option(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);
}

}  // namespace

Endpoint::Endpoint(const std::string& name) : name_(name) {}

std::string Endpoint::authority() const { return is_unix(name_) ? "localhost" : name_; }

std::string Endpoint::host() const {
  if (is_unix(name_)) return "localhost";
  std::string host = name_.substr(0, name_.rfind(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  return host;
}

std::vector<Endpoint::Address> Endpoint::addresses(std::string* error) const {
  std::vector<Address> found;
  if (is_unix(name_)) {
    Address address{};
    auto* target = reinterpret_cast<sockaddr_un*>(&address.bytes);
    std::string path = name_.substr(strlen(kUnixPrefix));
    if (path.size() >= sizeof target->sun_path) {
      *error = "the path of the socket is too long";
      return found;
    }
    target->sun_family = AF_UNIX;
    memcpy(target->sun_path, path.c_str(), path.size() + 1);
    address.size = socklen_t(offsetof(sockaddr_un, sun_path) + path.size() + 1);
    found.push_back(address);
    return found;
  }
  std::string port = name_.substr(name_.rfind(':') + 1);
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (int code = ::getaddrinfo(host().c_str(), port.c_str(), &hints, &list)) {
    *error = gai_strerror(code);
    return found;
  }
  for (addrinfo* each = list; each; each = each->ai_next) {
    Address address{};
    memcpy(&address.bytes, each->ai_addr, each->ai_addrlen);
    address.size = each->ai_addrlen;
    found.push_back(address);
  }
  ::freeaddrinfo(list);
  return found;
}

void tune_socket(int socket, int peer_lost_s) {
  // On a unix socket these fail and are not needed.
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, peer_lost_s * 1000);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, peer_lost_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool has_unacknowledged_bytes(int socket) {
  int family = 0, num_bytes = 0;
  socklen_t size = sizeof family;
  ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size);
  return family != AF_UNIX && ::ioctl(socket, SIOCOUTQ, &num_bytes) == 0 && num_bytes;
}

}  // namespace duck::stream
