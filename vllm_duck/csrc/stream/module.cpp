// vllm_duck.executor._stream: client and server of duck.proto on nghttp2.
#include <nghttp2/nghttp2.h>

#include "stream/stream_module.h"

namespace {

using namespace duck::binding;

PyObject* nghttp2_version_text(Arguments& args) {
  return args.done() ? to_text(nghttp2_version(0)->version_str) : nullptr;
}

}  // namespace

PyMODINIT_FUNC PyInit__stream() {
  auto functions = duck::stream::client_functions();
  for (auto& function : duck::stream::memory_functions()) functions.push_back(function);
  for (auto& function : duck::stream::server_functions()) functions.push_back(function);
  for (auto& function : duck::stream::tls_functions()) functions.push_back(function);
  functions.push_back(method<nghttp2_version_text>("nghttp2_version"));
  return make_module("_stream", "See vllm_duck.executor.native.client and server.",
                     std::move(functions));
}
