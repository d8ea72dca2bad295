#include "stream/tls/session.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>
#include <utility>

namespace duck::stream {
namespace {

constexpr unsigned char kAlpn[] = {2, 'h', '2'};
// Of what is collected for the socket, the memory that a thread keeps.
constexpr size_t kMaxSpareBytes = 1 << 20;

// Memory for what is collected: of a thread, since only one connection at a time has
// bytes that the socket does not take at once, as a rule.
std::string& spare() {
  static thread_local std::string memory;
  return memory;
}

// The peer says that it does not like this side's certificate, or misses one.
bool is_about_certificate(unsigned long error) {
  int alert = ERR_GET_REASON(error) - SSL_AD_REASON_OFFSET;
  return (alert >= SSL_AD_BAD_CERTIFICATE && alert <= SSL_AD_ACCESS_DENIED) ||
         alert == SSL_AD_DECRYPT_ERROR || alert == SSL_AD_CERTIFICATE_REQUIRED;
}

std::string describe_alert(const std::string& words) {
  return "it refused this host's certificate, or asks for one (" + words +
         "); set tls_cert and tls_key to a certificate of the duck's --tls-ca";
}

}  // namespace

std::string take_openssl_error() {
  unsigned long error = ERR_get_error();
  const char* words = ERR_reason_error_string(error);
  ERR_clear_error();
  return words ? words : "no reason given";
}

TlsSession::TlsSession(SSL_CTX* context, bool is_server, const std::string& peer_name)
    : ssl_(SSL_new(context)), peer_name_(peer_name) {
  BIO* bio = ssl_ ? BIO_new(bio_method()) : nullptr;
  if (!bio) throw std::bad_alloc();
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  if (is_server) {
    SSL_set_accept_state(ssl_.get());
  } else {
    SSL_set_connect_state(ssl_.get());
    expect_peer(peer_name);
  }
}

void TlsSession::expect_peer(const std::string& peer_name) {
  X509_VERIFY_PARAM* expected = SSL_get0_param(ssl_.get());
  bool is_set = X509_VERIFY_PARAM_set1_ip_asc(expected, peer_name.c_str()) == 1;
  if (!is_set) {
    ERR_clear_error();
    X509_VERIFY_PARAM_set_hostflags(expected, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    is_set = SSL_set1_host(ssl_.get(), peer_name.c_str()) == 1 &&
             SSL_set_tlsext_host_name(ssl_.get(), peer_name.c_str()) == 1;
  }
  // 0 is success here.
  if (!is_set || SSL_set_alpn_protos(ssl_.get(), kAlpn, sizeof kAlpn) != 0)
    throw std::bad_alloc();
}

BIO_METHOD* TlsSession::bio_method() {
  static BIO_METHOD* method = [] {
    BIO_METHOD* made =
        BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "vllm_duck");
    if (!made) throw std::bad_alloc();
    BIO_meth_set_write(made, write_out);
    BIO_meth_set_read(made, read_fed);
    BIO_meth_set_ctrl(made, control);
    return made;
  }();
  return method;
}

int TlsSession::write_out(BIO* bio, const char* data, int size) try {
  static_cast<TlsSession*>(BIO_get_data(bio))->out_.append(data, size_t(size));
  return size;
} catch (const std::bad_alloc&) {
  return -1;
}

int TlsSession::read_fed(BIO* bio, char* buffer, int room) {
  auto* self = static_cast<TlsSession*>(BIO_get_data(bio));
  size_t size = std::min(size_t(self->fed_end_ - self->fed_), size_t(room));
  BIO_clear_retry_flags(bio);
  if (size == 0) {
    BIO_set_retry_read(bio);
    return -1;
  }
  memcpy(buffer, self->fed_, size);
  self->fed_ += size;
  return int(size);
}

long TlsSession::control(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH;
}

void TlsSession::feed(const uint8_t* records, size_t num_bytes) {
  fed_ = records;
  fed_end_ = records + num_bytes;
}

bool TlsSession::shake_hands() {
  ERR_clear_error();
  int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    is_open_ = true;
    return true;
  }
  if (SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ) return true;
  return fail_handshake();
}

bool TlsSession::fail_handshake() {
  unsigned long error = ERR_peek_error();
  long verdict = SSL_get_verify_result(ssl_.get());
  std::string words = take_openssl_error();
  if (verdict != X509_V_OK) return fail(describe_refused_certificate(verdict));
  if (is_about_certificate(error)) return fail(describe_alert(words));
  return fail("no TLS could be agreed on with it (" + words +
              "); start the duck with --tls-cert and --tls-key, or leave out tls_ca");
}

std::string TlsSession::describe_refused_certificate(long verdict) const {
  std::string words = X509_verify_cert_error_string(verdict);
  switch (verdict) {
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return "its certificate is not for " + peer_name_ + " (" + words +
             "); give the duck a --tls-cert with the name of its endpoint";
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "its certificate is not valid now (" + words +
             "); renew the duck's --tls-cert, if both clocks are right";
    default:
      return "its certificate is refused (" + words +
             "); tls_ca must be the authority of the duck's --tls-cert";
  }
}

bool TlsSession::fail(std::string problem) {
  problem_ = std::move(problem);
  return false;
}

ssize_t TlsSession::read(uint8_t* buffer, size_t room) {
  ERR_clear_error();
  size_t size = 0;
  int result = SSL_read_ex(ssl_.get(), buffer, room, &size);
  if (result == 1) return ssize_t(size);
  int why = SSL_get_error(ssl_.get(), result);
  if (why == SSL_ERROR_WANT_READ) return 0;
  bool is_end = why == SSL_ERROR_ZERO_RETURN;
  unsigned long error = ERR_peek_error();
  std::string words = take_openssl_error();
  // In TLS 1.3 a client is through with the handshake before its certificate is looked
  // at.
  if (is_end)
    fail("the peer closed the connection");
  else if (is_about_certificate(error))
    fail(describe_alert(words));
  else
    fail("what came is no TLS as it must be (" + words + ")");
  return -1;
}

bool TlsSession::write(const uint8_t* data, size_t num_bytes) {
  if (out_.empty()) out_.swap(spare());
  ERR_clear_error();
  size_t size = 0;
  if (SSL_write_ex(ssl_.get(), data, num_bytes, &size) == 1) return true;
  return fail("TLS cannot go on (" + take_openssl_error() + ")");
}

int TlsSession::send_to(int socket) {
  while (num_unsent() > 0) {
    ssize_t size = ::send(socket, out_.data() + num_sent_, num_unsent(), MSG_NOSIGNAL);
    if (size < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
    }
    num_sent_ += size_t(size);
  }
  out_.clear();
  num_sent_ = 0;
  if (out_.capacity() <= kMaxSpareBytes && out_.capacity() > spare().capacity())
    out_.swap(spare());
  return 0;
}

}  // namespace duck::stream
