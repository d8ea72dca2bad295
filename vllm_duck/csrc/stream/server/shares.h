// What the hosts of one address have of a duck together: whatever they do, hosts
// elsewhere find some of it free.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>

namespace duck::stream {

struct Share {
  size_t num_connections = 0;
  size_t num_calls = 0;
  // Requests that arrive or wait, and replies that are not taken.
  size_t num_bytes = 0;
};
using ShareRef = std::shared_ptr<Share>;

// Bytes of an address: more than several hosts have with all that they may send at
// once.
inline size_t max_share_bytes(size_t max_message_bytes) {
  return std::max(size_t(1) << 30, 8 * max_message_bytes);
}

class Shares {
 public:
  // That of the address which the socket leads to; it lives as long as someone has it.
  ShareRef of(int socket);

 private:
  std::map<std::string, std::weak_ptr<Share>> shares_;
};

}  // namespace duck::stream
