// The functions of vllm_duck.executor._stream, by the source that has them.
#pragma once

#include <memory>

#include "base/arguments.h"
#include "stream/tls.h"

namespace duck::stream {

std::vector<PyMethodDef> client_functions();
std::vector<PyMethodDef> memory_functions();
std::vector<PyMethodDef> server_functions();
std::vector<PyMethodDef> tls_functions();

// What tls_new() gave, or null for None.
std::shared_ptr<TlsContext> tls_argument(binding::Arguments& args);

}  // namespace duck::stream
