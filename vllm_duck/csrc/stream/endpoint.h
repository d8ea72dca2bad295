// Where a duck listens.
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
  // The name or address without port and brackets, as a certificate has it.
  std::string host() const;
  // For HTTP/2's :authority.
  std::string authority() const;

  struct Address {
    sockaddr_storage bytes;
    socklen_t size;
  };
  // In the order in which they are to be tried; none, with a sentence in `error`, if
  // the name is unknown.
  std::vector<Address> addresses(std::string* error) const;

 private:
  std::string name_;
};

// What both ends set on a connected socket. `peer_lost_s`: how long sent bytes may stay
// unacknowledged.
void tune_socket(int socket, int peer_lost_s);

// Whether the other side's machine still has to take bytes. Of a unix socket, what is
// written is in the other process's hands already.
bool has_unacknowledged_bytes(int socket);

}  // namespace duck::stream
