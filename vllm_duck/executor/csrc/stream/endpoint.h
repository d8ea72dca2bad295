// Where a duck listens, and a socket that is on its way there.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace duck::stream {

class Endpoint {
 public:
  // "unix:/path" or "host:port", already checked.
  explicit Endpoint(const std::string& name);

  const std::string& name() const { return name_; }
  // For HTTP/2's :authority.
  std::string authority() const;

  // Starts to connect to the `attempt`-th address; returns the socket, or -1 with a
  // sentence in `error`. A host name is looked up each time: it may have moved.
  int connect(size_t attempt, size_t* num_addresses, std::string* error) const;

 private:
  struct Address {
    sockaddr_storage bytes;
    socklen_t size;
  };
  std::vector<Address> addresses(std::string* error) const;

  std::string name_;
};

// What both ends set on a connected socket. `peer_lost_s`: how long sent bytes may stay
// unacknowledged.
void tune_socket(int socket, int peer_lost_s);

}  // namespace duck::stream
