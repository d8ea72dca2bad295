// vllm_duck.executor._kernel: the C++ side of kernel.py, codec.py and checksums.py.
#include "base/crc32c.h"
#include "duck/kernel_module.h"
#include "duck/kernels/dispatch.h"

namespace duck {

PyObject* shape_error = nullptr;
PyObject* checkpoint_error = nullptr;

namespace {

using namespace duck::binding;

// crc32c(data, crc) -> the checksum of what crc covers followed by data
PyObject* checksum(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto crc = uint32_t(PyLong_AsUnsignedLong(args[1]));
  BytesView data;
  if (PyErr_Occurred() || !data.get(args[0])) return nullptr;
  with_gil_if_short(data.size(), [&] { crc = crc32c(data.data(), data.size(), crc); });
  return PyLong_FromUnsignedLong(crc);
}

// supported_isas() -> names, best first
PyObject* isa_names(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (auto* table : supported_kernels()) {
    PyObject* name = PyUnicode_FromString(table->name);
    if (names && name) PyList_Append(names, name);
    Py_XDECREF(name);
  }
  return names;
}

}  // namespace
}  // namespace duck

PyMODINIT_FUNC PyInit__kernel() {
  PyObject* errors = PyImport_ImportModule("vllm_duck.errors");
  if (!errors) return nullptr;
  duck::shape_error = PyObject_GetAttrString(errors, "DuckShapeError");
  duck::checkpoint_error = PyObject_GetAttrString(errors, "DuckCheckpointError");
  Py_DECREF(errors);
  if (!duck::shape_error || !duck::checkpoint_error) return nullptr;
  auto functions = duck::layer_functions();
  for (auto& function : duck::engine_functions()) functions.push_back(function);
  for (auto& function : duck::codec_functions()) functions.push_back(function);
  functions.push_back(duck::binding::fast<duck::checksum>("crc32c"));
  functions.push_back(duck::binding::no_args<duck::isa_names>("supported_isas"));
  return duck::binding::make_module("_kernel", "See vllm_duck.executor.kernel.",
                                    std::move(functions));
}
