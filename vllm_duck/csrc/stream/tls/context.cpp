// Certificates and keys: what OpenSSL is told once for all connections of an end, and
// again when their files have changed.
#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <string.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "stream/ticket.h"
#include "stream/tls/session.h"

namespace duck::stream {
namespace {

// So often, at most, files are looked at.
constexpr auto kLook = std::chrono::seconds(1);
// The first one costs least where there are instructions for AES; all are as good.
constexpr const char* kCiphers =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

struct FreePem {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using BioRef = std::unique_ptr<BIO, FreePem>;
using CertificateRef = std::unique_ptr<X509, FreePem>;
using KeyRef = std::unique_ptr<EVP_PKEY, FreePem>;
using ContextRef = std::unique_ptr<SSL_CTX, FreeSsl>;

[[noreturn]] void refuse(const char* what, const TlsSource& source,
                         const std::string& why) {
  std::string where = source.path.empty() ? "" : " " + source.path;
  throw std::invalid_argument(std::string(what) + where + ": " + why);
}

std::string pem_of(const char* what, const TlsSource& source) {
  if (source.path.empty()) return source.pem;
  std::ifstream file(source.path, std::ios::binary);
  if (!file) refuse(what, source, strerror(errno));
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

BioRef open_pem(const std::string& pem) {
  BioRef bio(BIO_new_mem_buf(pem.data(), int(pem.size())));
  if (!bio) throw std::bad_alloc();
  return bio;
}

// OpenSSL would ask at the terminal.
int no_password(char*, int, int, void*) { return -1; }

CertificateRef next_certificate(BIO* pem) {
  CertificateRef found(PEM_read_bio_X509(pem, nullptr, no_password, nullptr));
  ERR_clear_error();
  return found;
}

void load_authority(SSL_CTX* context, const TlsSource& source) {
  std::string pem = pem_of("tls_ca", source);
  BioRef bio = open_pem(pem);
  X509_STORE* store = SSL_CTX_get_cert_store(context);
  int num_found = 0;
  while (CertificateRef each = next_certificate(bio.get())) {
    X509_STORE_add_cert(store, each.get());
    ++num_found;
  }
  if (num_found == 0) refuse("tls_ca", source, "expected a certificate as PEM");
  // As grpcio does: an authority need not be at the root.
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
}

void load_certificate(SSL_CTX* context, const TlsSource& source) {
  std::string pem = pem_of("tls_cert", source);
  BioRef bio = open_pem(pem);
  CertificateRef own = next_certificate(bio.get());
  if (!own) refuse("tls_cert", source, "expected a certificate as PEM");
  if (SSL_CTX_use_certificate(context, own.get()) != 1)
    refuse("tls_cert", source, take_openssl_error());
  while (CertificateRef each = next_certificate(bio.get())) {
    if (SSL_CTX_add0_chain_cert(context, each.get()) != 1) throw std::bad_alloc();
    each.release();
  }
}

void load_key(SSL_CTX* context, const TlsSource& source) {
  std::string pem = pem_of("tls_key", source);
  BioRef bio = open_pem(pem);
  KeyRef key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  if (!key)
    refuse("tls_key", source,
           "expected a key as PEM, without a password (" + take_openssl_error() + ")");
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 ||
      SSL_CTX_check_private_key(context) != 1)
    refuse("tls_key", source, "not that of tls_cert (" + take_openssl_error() + ")");
}

// Of what the client offers, nothing but HTTP/2.
int select_alpn(SSL*, const unsigned char** chosen, unsigned char* chosen_size,
                const unsigned char* offered, unsigned size, void*) {
  for (unsigned at = 0; at < size; at += 1u + offered[at]) {
    if (offered[at] != 2 || at + 2 >= size || memcmp(offered + at + 1, "h2", 2) != 0)
      continue;
    *chosen = offered + at + 1;
    *chosen_size = 2;
    return SSL_TLSEXT_ERR_OK;
  }
  return SSL_TLSEXT_ERR_ALERT_FATAL;
}

void configure_server(SSL_CTX* context) {
  // A connection is made once and kept: there is nothing to resume.
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_options(context, SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_alpn_select_cb(context, select_alpn, nullptr);
}

ContextRef make_context(bool is_server, const TlsSources& sources) {
  ERR_clear_error();
  ContextRef context(
      SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method()));
  if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), kCiphers) != 1)
    throw std::runtime_error("OpenSSL has no TLS 1.3: " + take_openssl_error());
  if (!is_server && !sources.authority.is_given())
    throw std::invalid_argument("tls_ca: expected one, got none");
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  if (is_server) configure_server(context.get());
  if (sources.authority.is_given()) {
    load_authority(context.get(), sources.authority);
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT,
                       nullptr);
  }
  if (!sources.certificate.is_given()) return context;
  load_certificate(context.get(), sources.certificate);
  load_key(context.get(), sources.key);
  return context;
}

// What differs between two versions of a file.
using Stamp = std::tuple<ino_t, off_t, int64_t, int64_t>;
using Stamps = std::array<Stamp, 3>;

Stamp stamp_of(const TlsSource& source) {
  struct stat status {};
  if (source.path.empty() || ::stat(source.path.c_str(), &status) != 0) return {};
  return {status.st_ino, status.st_size, int64_t(status.st_mtim.tv_sec),
          int64_t(status.st_mtim.tv_nsec)};
}

Stamps stamps_of(const TlsSources& sources) {
  return {stamp_of(sources.authority), stamp_of(sources.certificate),
          stamp_of(sources.key)};
}

class OpenSslContext : public TlsContext {
 public:
  OpenSslContext(bool is_server, const TlsSources& sources)
      : is_server_(is_server),
        sources_(sources),
        stamps_(stamps_of(sources)),
        context_(make_context(is_server, sources)),
        next_look_(Clock::now() + kLook) {}

  std::unique_ptr<Tls> open(const std::string& peer_name) override {
    renew();
    return std::make_unique<TlsSession>(context_.get(), is_server_, peer_name);
  }

  std::string take_notice() override { return std::exchange(notice_, std::string()); }

 private:
  // A certificate and its key are two files, replaced one after the other: in between
  // they do not fit, and the next look finds both.
  void renew() {
    auto now = Clock::now();
    if (now < next_look_) return;
    next_look_ = now + kLook;
    Stamps stamps = stamps_of(sources_);
    if (stamps == stamps_) return;
    try {
      context_ = make_context(is_server_, sources_);
      stamps_ = stamps;
      problem_.clear();
    } catch (const std::exception& error) {
      if (problem_ == error.what()) return;
      notice_ = problem_ = error.what();
    }
  }

  bool is_server_;
  TlsSources sources_;
  Stamps stamps_;
  ContextRef context_;
  Clock::time_point next_look_;
  std::string problem_;  // of the files that are there now
  std::string notice_;
};

}  // namespace

std::shared_ptr<TlsContext> make_tls_context(bool is_server,
                                             const TlsSources& sources) {
  return std::make_shared<OpenSslContext>(is_server, sources);
}

}  // namespace duck::stream
