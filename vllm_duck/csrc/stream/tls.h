// TLS as a connection sees it. What implements it is left out where OpenSSL's headers
// are missing: see make_tls_context().
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace duck::stream {

// One connection's TLS, between what its socket carries and its plain bytes.
class Tls {
 public:
  virtual ~Tls() = default;

  // Hands over what the socket gave; it must stay there until read() returns 0 or less.
  virtual void feed(const uint8_t* records, size_t num_bytes) = 0;
  // Goes on with the handshake; false: it has failed, and problem() says why.
  virtual bool shake_hands() = 0;
  // The handshake is over, and the peer is whom it must be.
  virtual bool is_open() const = 0;
  // Plain bytes, one record's at most; 0: more must be fed. -1: see problem().
  virtual ssize_t read(uint8_t* buffer, size_t room) = 0;
  // Puts plain bytes behind what is to be sent. False: see problem().
  virtual bool write(const uint8_t* data, size_t num_bytes) = 0;
  // Encrypted, and not taken by the socket yet.
  virtual size_t num_unsent() const = 0;
  // Gives the socket what it takes; an errno when the connection is gone, else 0.
  virtual int send_to(int socket) = 0;
  // A sentence for people, with the option that would mend it.
  virtual const std::string& problem() const = 0;
};

// Where a certificate, key or authority comes from: from a file, which is read again
// when it has changed, or from here. Both empty: there is none.
struct TlsSource {
  std::string path;
  std::string pem;
  bool is_given() const { return !path.empty() || !pem.empty(); }
};

struct TlsSources {
  TlsSource authority;    // of the other side; a server with one asks for a certificate
  TlsSource certificate;  // with the chain behind it
  TlsSource key;
};

// What all connections of a client or a server share. Not for several threads at once.
class TlsContext {
 public:
  virtual ~TlsContext() = default;

  // For a new connection. Files that have changed are read again first, which is found
  // out once a second at most; while they cannot be used, the former ones are.
  // `peer_name`: the host name or address that a client expects in the certificate.
  virtual std::unique_ptr<Tls> open(const std::string& peer_name) = 0;
  // Why the files that are there now cannot be used, once; empty: they can.
  virtual std::string take_notice() = 0;
};

// Throws std::invalid_argument with a sentence that names the source.
std::shared_ptr<TlsContext> make_tls_context(bool is_server, const TlsSources& sources);

}  // namespace duck::stream
