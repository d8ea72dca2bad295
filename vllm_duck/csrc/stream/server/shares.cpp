#include "stream/server/shares.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <iterator>

namespace duck::stream {
namespace {

// Of IPv6 the half that names a network: a machine has all of the other one.
constexpr size_t kIpv6Bytes = 8;

// Empty for a unix socket: all who may open it are one user.
std::string address_of(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return "";
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    return {reinterpret_cast<const char*>(&ipv4), sizeof ipv4};
  }
  if (address.ss_family != AF_INET6) return "";
  const in6_addr& ipv6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  auto* bytes = reinterpret_cast<const char*>(ipv6.s6_addr);
  if (IN6_IS_ADDR_V4MAPPED(&ipv6)) return {bytes + 12, 4};
  return {bytes, kIpv6Bytes};
}

}  // namespace

ShareRef Shares::of(int socket) {
  for (auto at = shares_.begin(); at != shares_.end();)
    at = at->second.expired() ? shares_.erase(at) : std::next(at);
  std::weak_ptr<Share>& known = shares_[address_of(socket)];
  ShareRef share = known.lock();
  if (!share) known = share = std::make_shared<Share>();
  return share;
}

}  // namespace duck::stream
