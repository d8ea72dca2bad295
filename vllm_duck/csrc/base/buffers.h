// The memory of Python's bytes and arrays, held as long as these live.
#pragma once

#include <cstring>
#include <initializer_list>

#include "base/binding.h"

namespace duck::binding {

// The bytes of a C-contiguous object.
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
  bool require_size(const char* name, size_t num_bytes) const {
    if (size() == num_bytes) return true;
    PyErr_Format(PyExc_ValueError, "%s must have %zu bytes, got %zu", name, num_bytes,
                 size());
    return false;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(buffer_.buf);
  }
  size_t size() const { return size_t(buffer_.len); }

 protected:
  Py_buffer buffer_{};
  bool held_ = false;
};

// A numpy array, whose type and shape are checked.
class ArrayView : public BytesView {
 public:
  // Rows may be strided, elements of a row may not. `codes` lists the accepted struct
  // characters; a shape entry of -1 accepts any size.
  bool get(PyObject* object, const char* name, const char* codes,
           std::initializer_list<Py_ssize_t> shape, int flags) {
    bool is_writable = flags & PyBUF_WRITABLE;
    if (!BytesView::get(object, PyBUF_FORMAT | PyBUF_STRIDES | flags)) {
      PyErr_Format(shape_error, "%s must be %san array with strides", name,
                   is_writable ? "a writable array, " : "");
      return false;
    }
    return check_type(name, codes) && check_shape(name, shape);
  }

  bool require_contiguous(const char* name) const {
    if (PyBuffer_IsContiguous(&buffer_, 'C')) return true;
    PyErr_Format(shape_error, "%s must be C-contiguous", name);
    return false;
  }

  Py_ssize_t size(int axis) const { return buffer_.shape[axis]; }
  Py_ssize_t stride(int axis) const { return buffer_.strides[axis]; }
  char code() const { return buffer_.format ? buffer_.format[0] : 'B'; }

 private:
  bool check_type(const char* name, const char* codes) const {
    const char* format = buffer_.format ? buffer_.format : "B";
    if (std::strlen(format) == 1 && std::strchr(codes, format[0]) &&
        buffer_.itemsize == size_of(format[0]))
      return true;
    PyErr_Format(shape_error,
                 "%s must have a type code in \"%s\", got \"%s\" of %zd bytes", name,
                 codes, format, buffer_.itemsize);
    return false;
  }

  // "l" is 32-bit on some platforms and 64-bit on others.
  static Py_ssize_t size_of(char code) { return code == 'B' ? 1 : code == 'H' ? 2 : 4; }

  bool check_shape(const char* name, std::initializer_list<Py_ssize_t> shape) const {
    bool good = buffer_.ndim == int(shape.size());
    int axis = 0;
    for (Py_ssize_t expected : shape) {
      if (!good) break;
      good = expected < 0 || buffer_.shape[axis] == expected;
      if (!good)
        PyErr_Format(shape_error, "%s must have size %zd on axis %d, got %zd", name,
                     expected, axis, buffer_.shape[axis]);
      ++axis;
    }
    if (good && (buffer_.ndim == 0 || buffer_.shape[buffer_.ndim - 1] <= 1 ||
                 buffer_.strides[buffer_.ndim - 1] == buffer_.itemsize))
      return true;
    if (!PyErr_Occurred())
      PyErr_Format(shape_error, "%s must have %d axes, the last one contiguous", name,
                   int(shape.size()));
    return false;
  }
};

}  // namespace duck::binding
