// The functions of vllm_duck.executor._stream, by the source that has them.
#pragma once

#include "base/arguments.h"

namespace duck::stream {

std::vector<PyMethodDef> client_functions();
std::vector<PyMethodDef> memory_functions();
std::vector<PyMethodDef> server_functions();

}  // namespace duck::stream
