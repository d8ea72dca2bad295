// The functions of vllm_duck.executor._kernel, and the arrays that they take.
#pragma once

#include <cstring>
#include <initializer_list>

#include "base/binding.h"

namespace duck {

std::vector<PyMethodDef> layer_functions();
std::vector<PyMethodDef> engine_functions();
std::vector<PyMethodDef> codec_functions();

constexpr const char* kLayerName = "vllm_duck.Layer";

// DuckShapeError and DuckCheckpointError.
extern PyObject* shape_error;
extern PyObject* checkpoint_error;

// Reads `count` ints that Python has range-checked.
inline bool read_ints(PyObject* const* args, int count, int* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = int(PyLong_AsLong(args[i]));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// A numpy array, checked and held as long as this lives.
class ArrayView {
 public:
  ArrayView() = default;
  ~ArrayView() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  // Rows may be strided, elements of a row may not. `codes` lists the accepted struct
  // characters; a shape entry of -1 accepts any size.
  bool get(PyObject* object, const char* name, const char* codes,
           std::initializer_list<Py_ssize_t> shape, bool writable = false) {
    int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &buffer_, flags) < 0) {
      PyErr_Format(shape_error, "%s must be %san array with strides", name,
                   writable ? "a writable array, " : "");
      return false;
    }
    held_ = true;
    return check_type(name, codes) && check_shape(name, shape);
  }

  bool require_contiguous(const char* name) const {
    if (PyBuffer_IsContiguous(&buffer_, 'C')) return true;
    PyErr_Format(shape_error, "%s must be C-contiguous", name);
    return false;
  }

  template <class T>
  T* data() const {
    return static_cast<T*>(buffer_.buf);
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

  Py_buffer buffer_{};
  bool held_ = false;
};

}  // namespace duck
