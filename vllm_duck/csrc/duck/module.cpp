// vllm_duck.executor._kernel: the C++ side of kernel.py, codec.py and checksums.py.
#include "base/crc32c.h"
#include "duck/kernel_module.h"

namespace duck {

PyObject* checkpoint_error = nullptr;

namespace {

using namespace duck::binding;

// -> the checksum of what crc covers followed by data
PyObject* checksum(Arguments& args) {
  BytesView data;
  args.bytes("data", &data);
  uint32_t crc = args.u32("crc");
  if (!args.done()) return nullptr;
  auto* at = data.data<uint8_t>();
  with_gil_if_short(data.size(), [&] { crc = crc32c(at, data.size(), crc); });
  return PyLong_FromUnsignedLong(crc);
}

}  // namespace
}  // namespace duck

PyMODINIT_FUNC PyInit__kernel() {
  PyObject* errors = PyImport_ImportModule("vllm_duck.errors");
  if (!errors) return nullptr;
  duck::checkpoint_error = PyObject_GetAttrString(errors, "DuckCheckpointError");
  Py_DECREF(errors);
  if (!duck::checkpoint_error) return nullptr;
  auto functions = duck::layer_functions();
  for (auto& function : duck::engine_functions()) functions.push_back(function);
  for (auto& function : duck::codec_functions()) functions.push_back(function);
  functions.push_back(duck::binding::method<duck::checksum>("crc32c"));
  return duck::binding::make_module("_kernel", "See vllm_duck.executor.kernel.",
                                    std::move(functions));
}
