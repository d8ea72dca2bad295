// The arguments of a call from Python, read one after the other. They come by position,
// or by the name that they are read with; the first mistake sticks and is Python's
// error.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/buffers.h"

namespace duck::binding {

class Arguments {
 public:
  // As in METH_FASTCALL | METH_KEYWORDS.
  Arguments(PyObject* const* args, Py_ssize_t num_positional, PyObject* keywords)
      : args_(args),
        num_positional_(num_positional),
        keywords_(keywords),
        num_keywords_(keywords ? PyTuple_Size(keywords) : 0) {}

  // Whether what was read so far is right.
  bool good() const { return !PyErr_Occurred(); }
  // And nothing is left.
  bool done() const {
    Py_ssize_t count = num_positional_ + num_keywords_;
    if (good() && num_read_ != count)
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", num_read_,
                   count);
    return good();
  }

  // Borrowed.
  PyObject* object(const char* name) {
    if (!good()) return nullptr;
    PyObject* found = num_read_ < num_positional_ ? args_[num_read_] : named(name);
    ++num_read_;
    if (!found) PyErr_Format(PyExc_TypeError, "the argument %s is missing", name);
    return found;
  }

  int integer(const char* name) {
    long value = read(name, "an integer", PyLong_AsLong);
    if (value != int(value))
      PyErr_Format(PyExc_OverflowError, "%s must have 32 bits, got %ld", name, value);
    return int(value);
  }
  uint64_t u64(const char* name) { return read(name, "an integer", to_u64); }
  uint32_t u32(const char* name) {
    uint64_t value = u64(name);
    if (value >> 32 && good())
      PyErr_Format(shape_error, "%s must be below 2^32, got %llu", name,
                   static_cast<unsigned long long>(value));
    return uint32_t(value);
  }
  double real(const char* name) { return read(name, "a number", PyFloat_AsDouble); }
  bool truth(const char* name) { return read(name, "a bool", PyObject_IsTrue) == 1; }
  std::string text(const char* name) { return read(name, "a str", to_string); }

  std::vector<int> integers(const char* name) {
    return read(name, "a tuple of integers", [](PyObject* tuple) {
      return items(tuple, [](PyObject* item) { return int(PyLong_AsLong(item)); });
    });
  }
  std::vector<std::string> texts(const char* name) {
    return read(name, "a tuple of str",
                [](PyObject* tuple) { return items(tuple, to_string); });
  }

  // What a capsule owns; null if it was not good.
  template <class T>
  T* held(const char* name) {
    return read(name, capsule_name<T>, from_capsule<T>);
  }

  // The address of an array, or an address: unchecked. The caller's reference keeps it
  // for the time of the call.
  template <class T>
  T* memory(const char* name) {
    return read(name, "an array or an address", [](PyObject* arg) {
      if (PyLong_Check(arg)) return static_cast<T*>(PyLong_AsVoidPtr(arg));
      BytesView view;
      return view.get(arg) ? view.data<T>() : nullptr;
    });
  }

  bool bytes(const char* name, BytesView* view) {
    PyObject* arg = object(name);
    return arg && view->get(arg);
  }
  bool bytes(const char* name, BytesView* view, size_t num_bytes) {
    return bytes(name, view) && view->require_size(name, num_bytes);
  }

  using Shape = std::initializer_list<Py_ssize_t>;

  // See ArrayView; C-contiguous.
  bool array(const char* name, ArrayView* view, const char* codes, Shape shape,
             int flags = 0) {
    return rows(name, view, codes, shape, flags) && view->require_contiguous(name);
  }
  bool rows(const char* name, ArrayView* view, const char* codes, Shape shape,
            int flags = 0) {
    PyObject* arg = object(name);
    return arg && view->get(arg, name, codes, shape, flags);
  }

 private:
  PyObject* named(const char* name) const {
    for (Py_ssize_t i = 0; i < num_keywords_; ++i) {
      PyObject* keyword = PyTuple_GetItem(keywords_, i);
      if (PyUnicode_CompareWithASCIIString(keyword, name) == 0)
        return args_[num_positional_ + i];
    }
    return nullptr;
  }

  template <class Convert>
  using Result = std::invoke_result_t<const Convert&, PyObject*>;

  template <class Convert>
  Result<Convert> read(const char* name, const char* expected, const Convert& convert) {
    PyObject* arg = object(name);
    Result<Convert> value{};
    if (!arg) return value;
    value = convert(arg);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))
      PyErr_Format(PyExc_TypeError, "%s must be %s, got %R", name, expected, arg);
    return value;
  }

  // Also of numpy's integers.
  static uint64_t to_u64(PyObject* number) {
    PyObject* whole = PyNumber_Index(number);
    if (!whole) return 0;
    uint64_t value = PyLong_AsUnsignedLongLong(whole);
    Py_DECREF(whole);
    return value;
  }

  template <class Convert>
  static std::vector<Result<Convert>> items(PyObject* tuple, const Convert& convert) {
    std::vector<Result<Convert>> found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple) && !PyErr_Occurred(); ++i)
      found.push_back(convert(PyTuple_GetItem(tuple, i)));
    return found;
  }

  PyObject* const* args_;
  Py_ssize_t num_positional_;
  PyObject* keywords_;
  Py_ssize_t num_keywords_;
  Py_ssize_t num_read_ = 0;
};

using Function = PyObject* (*)(Arguments&);

// What Python calls: an exception of `function` becomes Python's. It may not leave
// through the interpreter's C, where it would end the process.
template <Function function>
PyObject* called(PyObject*, PyObject* const* args, Py_ssize_t num_positional,
                 PyObject* keywords) {
  try {
    Arguments arguments(args, num_positional, keywords);
    return function(arguments);
  } catch (const std::exception& error) {
    return raise(error);
  }
}

template <Function function>
PyMethodDef method(const char* name) {
  auto* erased = reinterpret_cast<void (*)()>(called<function>);
  return {name, reinterpret_cast<PyCFunction>(erased), METH_FASTCALL | METH_KEYWORDS,
          nullptr};
}

}  // namespace duck::binding
