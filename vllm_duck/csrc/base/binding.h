// What every extension module here needs of Python's stable ABI.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <new>
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

// The bytes of a C-contiguous Python object, held as long as this lives.
class BytesView {
 public:
  BytesView() = default;
  ~BytesView() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;

  bool get(PyObject* object, int flags = PyBUF_SIMPLE) {
    held_ = PyObject_GetBuffer(object, &buffer_, flags) == 0;
    return held_;
  }
  // Exactly this many bytes.
  bool get(PyObject* object, size_t num_bytes, int flags = PyBUF_SIMPLE) {
    if (!get(object, flags)) return false;
    if (size() == num_bytes) return true;
    PyErr_Format(PyExc_ValueError, "expected a buffer of %zu bytes, got %zu", num_bytes,
                 size());
    return false;
  }
  void* data() const { return buffer_.buf; }
  size_t size() const { return size_t(buffer_.len); }

 private:
  Py_buffer buffer_{};
  bool held_ = false;
};

template <class T>
T* from_capsule(PyObject* capsule, const char* name) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

template <class T>
void destroy(PyObject* capsule) {
  delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

inline bool require_args(Py_ssize_t got, Py_ssize_t expected) {
  if (got == expected) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
  return false;
}

inline PyObject* raise(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return PyErr_NoMemory();
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

// What Python calls: an exception of `function` becomes Python's. It may not leave
// through the interpreter's C, where it would end the process.
template <auto function, class... Args>
PyObject* guarded(Args... args) {
  try {
    return function(args...);
  } catch (const std::exception& error) {
    return raise(error);
  }
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

template <FastFunction function>
PyMethodDef fast(const char* name) {
  FastFunction entry = guarded<function, PyObject*, PyObject* const*, Py_ssize_t>;
  auto* erased = reinterpret_cast<void (*)()>(entry);
  return {name, reinterpret_cast<PyCFunction>(erased), METH_FASTCALL, nullptr};
}

// Of one argument.
template <PyCFunction function>
PyMethodDef single(const char* name) {
  return {name, guarded<function, PyObject*, PyObject*>, METH_O, nullptr};
}

template <PyCFunction function>
PyMethodDef no_args(const char* name) {
  return {name, guarded<function, PyObject*, PyObject*>, METH_NOARGS, nullptr};
}

// Called once, by the module's init function.
inline PyObject* make_module(const char* name, const char* doc,
                             std::vector<PyMethodDef> functions) {
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
