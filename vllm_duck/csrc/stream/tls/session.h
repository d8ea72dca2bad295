// Tls with OpenSSL, which never touches a socket here: it reads what was fed, and what
// it writes is collected and sent with one system call, where OpenSSL's own way takes
// one for each record of 16 KiB.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "stream/tls.h"

namespace duck::stream {

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

// The oldest of this thread's errors of OpenSSL, as a few words; clears them.
std::string take_openssl_error();

class TlsSession : public Tls {
 public:
  // `peer_name`: see TlsContext; empty at a server.
  TlsSession(SSL_CTX* context, bool is_server, const std::string& peer_name);

  void feed(const uint8_t* records, size_t num_bytes) override;
  bool shake_hands() override;
  bool is_open() const override { return is_open_; }
  ssize_t read(uint8_t* buffer, size_t room) override;
  bool write(const uint8_t* data, size_t num_bytes) override;
  size_t num_unsent() const override { return out_.size() - num_sent_; }
  int send_to(int socket) override;
  const std::string& problem() const override { return problem_; }

 private:
  static int write_out(BIO* bio, const char* data, int size);
  static int read_fed(BIO* bio, char* buffer, int room);
  static long control(BIO* bio, int command, long, void*);
  static BIO_METHOD* bio_method();

  void expect_peer(const std::string& peer_name);
  bool fail(std::string problem);
  bool fail_handshake();
  std::string describe_refused_certificate(long verdict) const;

  std::unique_ptr<SSL, FreeSsl> ssl_;
  std::string peer_name_;
  const uint8_t* fed_ = nullptr;
  const uint8_t* fed_end_ = nullptr;
  std::string out_;
  size_t num_sent_ = 0;  // of out_
  bool is_open_ = false;
  std::string problem_;
};

}  // namespace duck::stream
