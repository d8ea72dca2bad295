// The functions of vllm_duck.executor._stream, and how they read and give text.
#pragma once

#include <string>

#include "base/binding.h"

namespace duck::stream {

std::vector<PyMethodDef> client_functions();
std::vector<PyMethodDef> server_functions();

inline bool read_string(PyObject* object, std::string* out) {
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text) out->assign(text, size_t(size));
  return text;
}

inline PyObject* to_text(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace");
}

inline PyObject* to_bytes(const void* data, size_t size) {
  return PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size));
}

}  // namespace duck::stream
