// TLS to Python; executor/native/tls.py is its only user.
#ifdef DUCK_HAS_OPENSSL
#include <openssl/crypto.h>
#endif

#include "stream/stream_module.h"

template <>
inline constexpr const char*
    duck::binding::capsule_name<std::shared_ptr<duck::stream::TlsContext>> =
        "vllm_duck.StreamTls";

namespace duck::stream {
namespace {

using namespace duck::binding;
using ContextRef = std::shared_ptr<TlsContext>;

#ifdef DUCK_HAS_OPENSSL

PyObject* openssl_version(Arguments& args) {
  return args.done() ? to_text(OpenSSL_version(OPENSSL_VERSION_STRING)) : nullptr;
}

// -> what client_new and server_new take as tls; each source is a path and a text, of
// which one is empty, or both
PyObject* tls_new(Arguments& args) {
  bool is_server = args.truth("is_server");
  TlsSources sources;
  auto read = [&args](const char* path, const char* pem) {
    TlsSource source;
    source.path = args.text(path);
    source.pem = args.text(pem);
    return source;
  };
  sources.authority = read("ca_path", "ca");
  sources.certificate = read("cert_path", "cert");
  sources.key = read("key_path", "key");
  if (!args.done()) return nullptr;
  return to_capsule(std::make_unique<ContextRef>(make_tls_context(is_server, sources)));
}

#endif

}  // namespace

ContextRef tls_argument(Arguments& args) {
  PyObject* capsule = args.object("tls");
  if (!capsule || capsule == Py_None) return nullptr;
  auto* held = from_capsule<ContextRef>(capsule);
  return held ? *held : nullptr;
}

// Without OpenSSL there are none, which is how Python knows.
std::vector<PyMethodDef> tls_functions() {
#ifdef DUCK_HAS_OPENSSL
  return {method<openssl_version>("openssl_version"), method<tls_new>("tls_new")};
#else
  return {};
#endif
}

}  // namespace duck::stream
