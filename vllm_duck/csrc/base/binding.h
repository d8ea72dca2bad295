// What every extension module here needs of Python's stable ABI.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace duck::binding {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  // When the interpreter ends, Python before 3.14 ends a daemon thread here, by
  // unwinding its stack: destructors would run without the GIL, and this one may not be
  // left that way. As from 3.14 on, the thread stands still until the process ends.
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) ::pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Copying or summing `num_bytes`: what takes less than 100 us keeps the GIL, since
// another thread may take milliseconds to give it back.
template <class Work>
void with_gil_if_short(size_t num_bytes, const Work& work) {
  if (num_bytes < 1 << 20) return work();
  WithoutGil released;
  work();
}

// What the capsules of a class are called.
template <class T>
inline constexpr const char* capsule_name = nullptr;

template <class T>
T* from_capsule(PyObject* capsule) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, capsule_name<T>));
}

template <class T>
void destroy(PyObject* capsule) {
  delete from_capsule<T>(capsule);
}

template <class T>
PyObject* to_capsule(std::unique_ptr<T> object) {
  PyObject* capsule = PyCapsule_New(object.get(), capsule_name<T>, destroy<T>);
  if (capsule) object.release();
  return capsule;
}

inline std::string to_string(PyObject* text) {
  Py_ssize_t size;
  const char* found = PyUnicode_AsUTF8AndSize(text, &size);
  return found ? std::string(found, size_t(size)) : std::string();
}

inline PyObject* to_text(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace");
}

inline PyObject* to_bytes(const void* data, size_t size) {
  return PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size));
}

// make_item(index) -> a new reference, or null with an error set
template <class MakeItem>
PyObject* make_list(size_t size, const MakeItem& make_item) {
  PyObject* list = PyList_New(Py_ssize_t(size));
  for (size_t i = 0; list && i < size; ++i) {
    PyObject* item = make_item(i);
    if (!item || PyList_SetItem(list, Py_ssize_t(i), item) < 0) Py_CLEAR(list);
  }
  return list;
}

inline PyObject* raise(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return PyErr_NoMemory();
  bool is_value = dynamic_cast<const std::invalid_argument*>(&error);
  PyErr_SetString(is_value ? PyExc_ValueError : PyExc_RuntimeError, error.what());
  return nullptr;
}

// DuckShapeError, as of make_module().
inline PyObject* shape_error = nullptr;

// Called once, by the module's init function.
inline PyObject* make_module(const char* name, const char* doc,
                             std::vector<PyMethodDef> functions) {
  PyObject* errors = PyImport_ImportModule("vllm_duck.errors");
  if (errors) shape_error = PyObject_GetAttrString(errors, "DuckShapeError");
  Py_XDECREF(errors);
  if (!shape_error) return nullptr;
  static std::vector<PyMethodDef> methods;
  methods = std::move(functions);
  methods.push_back({nullptr, nullptr, 0, nullptr});
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               name,
                               doc,
                               -1,
                               methods.data(),
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}

}  // namespace duck::binding
