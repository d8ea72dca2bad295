// vllm_duck.executor._kernel: the C++ side of kernel.py, which is its only user and
// has checked plain numbers already. Buffers, ids and weights are checked here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

#include "crc32c.h"
#include "dispatch.h"
#include "engine.h"
#include "quantize.h"
#include "shard.h"

namespace {

using duck::Engine;
using duck::Format;
using duck::Layer;
using duck::LayerShape;

constexpr const char* kLayerName = "vllm_duck.Layer";
constexpr const char* kEngineName = "vllm_duck.Engine";

// Below 100 us the GIL is kept: another thread may take milliseconds to give it back.
constexpr Py_ssize_t kBytesWorthTheGil = 1 << 20;

PyObject* shape_error = nullptr;
PyObject* checkpoint_error = nullptr;

// A Python buffer that is released with its scope.
class View {
 public:
  View() = default;
  ~View() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

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

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

template <class T>
T* from_capsule(PyObject* capsule, const char* name) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

template <class T>
void destroy(PyObject* capsule) {
  delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

// Reads `count` ints that Python has range-checked.
bool read_ints(PyObject* const* args, int count, int* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = int(PyLong_AsLong(args[i]));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

bool require_args(Py_ssize_t got, Py_ssize_t expected) {
  if (got == expected) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
  return false;
}

// layer_new(num_experts, hidden, columns, column_phase, format) -> layer
PyObject* layer_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int v[5];
  if (!require_args(num_args, 5) || !read_ints(args, 5, v)) return nullptr;
  LayerShape shape = {v[0], v[1], v[2], v[3], Format(v[4])};
  try {
    return PyCapsule_New(new Layer(shape), kLayerName, destroy<Layer>);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* layer_resident_bytes(PyObject*, PyObject* capsule) {
  auto* layer = from_capsule<Layer>(capsule, kLayerName);
  return layer ? PyLong_FromSize_t(layer->resident_bytes()) : nullptr;
}

PyObject* layer_first_missing(PyObject*, PyObject* capsule) {
  auto* layer = from_capsule<Layer>(capsule, kLayerName);
  return layer ? PyLong_FromLong(layer->first_missing()) : nullptr;
}

// layer_load(layer, expert, gate, up, down, gate_scale, up_scale, down_scale)
// -> None, or (matrix index, is_scale) of what is not finite.
PyObject* layer_load(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  static const char* const kNames[6] = {"gate",       "up",       "down",
                                        "gate_scale", "up_scale", "down_scale"};
  int expert;
  if (!require_args(num_args, 8) || !read_ints(args + 1, 1, &expert)) return nullptr;
  auto* layer = from_capsule<Layer>(args[0], kLayerName);
  if (!layer) return nullptr;
  const LayerShape& shape = layer->shape();
  Format format = shape.format;
  View weights[3], scales[3];
  duck::SourceMatrix matrices[3];
  for (int m = 0; m < 3; ++m) {
    bool is_down = m == 2;
    Py_ssize_t rows = is_down ? shape.hidden : shape.columns;
    duck::KAxis axis = is_down ? shape.down_axis() : shape.gate_up_axis();
    bool is_bf16 = format == Format::kBf16, is_int4 = format == Format::kInt4;
    if (!weights[m].get(args[2 + m], kNames[m], is_bf16 ? "H" : "B",
                        {rows, is_int4 ? axis.length / 2 : axis.length}))
      return nullptr;
    matrices[m] = {weights[m].data<uint8_t>(), weights[m].stride(0), nullptr};
    if (is_bf16) continue;
    bool is_grouped = duck::is_grouped(format);
    Py_ssize_t blocks = is_down ? shape.hidden_blocks() : shape.column_blocks();
    if (!scales[m].get(args[5 + m], kNames[3 + m], is_grouped ? "H" : "f",
                       {is_grouped ? rows : blocks, axis.num_segments()}) ||
        !scales[m].require_contiguous(kNames[3 + m]))
      return nullptr;
    matrices[m].scales = scales[m].data<void>();
  }
  duck::PackResult result;
  int bad_matrix = 0;
  {
    WithoutGil released;
    result = layer->load(expert, matrices, &bad_matrix);
  }
  if (result == duck::PackResult::kOk) Py_RETURN_NONE;
  return Py_BuildValue("(ii)", bad_matrix, int(result == duck::PackResult::kBadScale));
}

// quantize(weight, scale or None, row_phase, k_position, format, codes, scales)
// -> whether all weights were finite. Weight and codes are [rows][k].
PyObject* quantize(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int v[3];
  if (!require_args(num_args, 7) || !read_ints(args + 2, 3, v)) return nullptr;
  View weight, scale, codes, scales;
  if (!weight.get(args[0], "weight", "BH", {-1, -1})) return nullptr;
  int rows = int(weight.size(0)), k = int(weight.size(1));
  bool is_bf16 = weight.code() == 'H';
  Format from = is_bf16 ? Format::kBf16 : Format::kE4m3, to = Format(v[2]);
  duck::KAxis blocks(k, v[1], from), groups(k, v[1], to);
  Py_ssize_t row_blocks = duck::ceil_div(v[0] + rows, duck::kBlock);
  if (!is_bf16 &&
      (!scale.get(args[1], "scale", "f", {row_blocks, blocks.num_segments()}) ||
       !scale.require_contiguous("scale")))
    return nullptr;
  if (!codes.get(args[5], "codes", "B", {rows, to == Format::kInt4 ? k / 2 : k},
                 true) ||
      !codes.require_contiguous("codes") ||
      !scales.get(args[6], "scales", "H", {rows, groups.num_segments()}, true) ||
      !scales.require_contiguous("scales"))
    return nullptr;
  duck::QuantizeSource source = {from,
                                 weight.data<uint8_t>(),
                                 weight.stride(0),
                                 is_bf16 ? nullptr : scale.data<float>(),
                                 rows,
                                 v[0],
                                 k,
                                 v[1]};
  bool good;
  {
    WithoutGil released;
    good = duck::quantize(source, to, codes.data<uint8_t>(), scales.data<uint16_t>());
  }
  return PyBool_FromLong(good);
}

// engine_new(num_threads, isa, cpus) -> engine, or None if the CPU lacks the isa
PyObject* engine_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int num_threads;
  if (!require_args(num_args, 3) || !read_ints(args, 1, &num_threads)) return nullptr;
  const char* isa = PyUnicode_AsUTF8AndSize(args[1], nullptr);
  if (!isa) return nullptr;
  std::vector<int> cpus(size_t(PyTuple_Size(args[2])));
  for (size_t i = 0; i < cpus.size(); ++i) {
    PyObject* cpu = PyTuple_GetItem(args[2], Py_ssize_t(i));
    if (!cpu || !read_ints(&cpu, 1, &cpus[i])) return nullptr;
  }
  const duck::KernelTable* kernels = duck::find_kernels(isa);
  if (!kernels) Py_RETURN_NONE;
  try {
    return PyCapsule_New(new Engine(kernels, num_threads, cpus), kEngineName,
                         destroy<Engine>);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* engine_isa(PyObject*, PyObject* capsule) {
  auto* engine = from_capsule<Engine>(capsule, kEngineName);
  return engine ? PyUnicode_FromString(engine->isa()) : nullptr;
}

PyObject* engine_first_touch(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* engine = from_capsule<Engine>(args[0], kEngineName);
  auto* layer = from_capsule<Layer>(args[1], kLayerName);
  if (!engine || !layer) return nullptr;
  {
    WithoutGil released;
    engine->first_touch(layer);
  }
  Py_RETURN_NONE;
}

PyObject* engine_read_weights(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* engine = from_capsule<Engine>(args[0], kEngineName);
  auto* layer = engine ? from_capsule<Layer>(args[1], kLayerName) : nullptr;
  if (!layer) return nullptr;
  float sum;
  {
    WithoutGil released;
    sum = engine->read_weights(*layer);
  }
  return PyFloat_FromDouble(sum);
}

bool check_ids(const int32_t* ids, Py_ssize_t count, int topk, int n_routed_experts) {
  for (Py_ssize_t i = 0; i < count; ++i)
    if (unsigned(ids[i]) >= unsigned(n_routed_experts)) {
      PyErr_Format(shape_error,
                   "topk_ids must be in [0, %d), got %d in row %zd; the router and the "
                   "duck disagree about n_routed_experts",
                   n_routed_experts, int(ids[i]), i / topk);
      return false;
    }
  return true;
}

// forward(engine, layer, hidden, topk_ids, topk_weights, expert_lo, n_routed_experts,
//         out)
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 8)) return nullptr;
  auto* engine = from_capsule<Engine>(args[0], kEngineName);
  auto* layer = engine ? from_capsule<Layer>(args[1], kLayerName) : nullptr;
  int range[2];
  if (!layer || !read_ints(args + 5, 2, range)) return nullptr;
  View hidden, ids, weights, out;
  if (!hidden.get(args[2], "hidden", "H", {-1, layer->shape().hidden}) ||
      !ids.get(args[3], "topk_ids", "il", {hidden.size(0), -1}) ||
      !weights.get(args[4], "topk_weights", "f", {hidden.size(0), ids.size(1)}) ||
      !out.get(args[7], "out", "fH", {hidden.size(0), layer->shape().hidden}, true))
    return nullptr;
  if (!hidden.require_contiguous("hidden") || !ids.require_contiguous("topk_ids") ||
      !weights.require_contiguous("topk_weights") || !out.require_contiguous("out"))
    return nullptr;
  Py_ssize_t num_tokens = hidden.size(0), topk = ids.size(1);
  if (topk == 0 || num_tokens > (1 << 24) / topk) {
    PyErr_Format(shape_error, "topk_ids must have 1 to 2^24 entries, got %zd x %zd",
                 num_tokens, topk);
    return nullptr;
  }
  if (!check_ids(ids.data<int32_t>(), num_tokens * topk, int(topk), range[1]))
    return nullptr;
  if (int missing = layer->first_missing(); missing >= 0) {
    PyErr_Format(checkpoint_error, "expert %d of the shard was never loaded", missing);
    return nullptr;
  }
  bool is_fp32 = out.code() == 'f';
  duck::Call call = {layer,
                     hidden.data<uint16_t>(),
                     ids.data<int32_t>(),
                     weights.data<float>(),
                     int(num_tokens),
                     int(topk),
                     range[0],
                     is_fp32 ? out.data<float>() : nullptr,
                     is_fp32 ? nullptr : out.data<uint16_t>()};
  bool no_memory = false;
  {
    WithoutGil released;
    try {
      engine->forward(call);
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  }
  if (no_memory) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// A shard's Compute, and the capsules of what it computes with.
struct OwnedShard {
  OwnedShard(PyObject* engine, PyObject* layers, Engine* pointer, int expert_lo,
             int n_routed_experts)
      : shard(pointer, expert_lo, n_routed_experts),
        compute{&shard, duck::Shard::forward},
        engine(Py_NewRef(engine)),
        layers(Py_NewRef(layers)) {}
  ~OwnedShard() {
    Py_DECREF(engine);
    Py_DECREF(layers);
  }

  duck::Shard shard;
  duck::Compute compute;
  PyObject* engine;
  PyObject* layers;
};

void destroy_shard(PyObject* capsule) {
  delete static_cast<OwnedShard*>(PyCapsule_GetContext(capsule));
}

// shard_new(engine, layers: {layer_idx: layer}, expert_lo, n_routed_experts)
// -> the shard's Compute
PyObject* shard_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int range[2];
  if (!require_args(num_args, 4) || !read_ints(args + 2, 2, range)) return nullptr;
  auto* engine = from_capsule<Engine>(args[0], kEngineName);
  if (!engine) return nullptr;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  auto owned =
      std::make_unique<OwnedShard>(args[0], args[1], engine, range[0], range[1]);
  while (PyDict_Next(args[1], &position, &key, &value)) {
    int layer_idx;
    auto* layer = from_capsule<Layer>(value, kLayerName);
    if (!layer || !read_ints(&key, 1, &layer_idx)) return nullptr;
    if (int missing = layer->first_missing(); missing >= 0) {
      PyErr_Format(checkpoint_error, "expert %d of the shard was never loaded", missing);
      return nullptr;
    }
    owned->shard.add(uint32_t(layer_idx), layer);
  }
  PyObject* capsule = PyCapsule_New(&owned->compute, duck::kComputeName, destroy_shard);
  if (capsule) PyCapsule_SetContext(capsule, owned.release());
  return capsule;
}

// crc32c(data, crc) -> the checksum of what crc covers followed by data
PyObject* crc32c(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  unsigned long crc = PyLong_AsUnsignedLong(args[1]);
  Py_buffer data;
  if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
    return nullptr;
  uint32_t sum;
  if (data.len < kBytesWorthTheGil) {
    sum = duck::crc32c(data.buf, size_t(data.len), uint32_t(crc));
  } else {
    WithoutGil released;
    sum = duck::crc32c(data.buf, size_t(data.len), uint32_t(crc));
  }
  PyBuffer_Release(&data);
  return PyLong_FromUnsignedLong(sum);
}

// supported_isas() -> names, best first
PyObject* supported_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (auto* table : duck::supported_kernels()) {
    PyObject* name = PyUnicode_FromString(table->name);
    if (names && name) PyList_Append(names, name);
    Py_XDECREF(name);
  }
  return names;
}

template <class Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"layer_new", fast(layer_new), METH_FASTCALL, nullptr},
    {"layer_load", fast(layer_load), METH_FASTCALL, nullptr},
    {"layer_resident_bytes", layer_resident_bytes, METH_O, nullptr},
    {"layer_first_missing", layer_first_missing, METH_O, nullptr},
    {"quantize", fast(quantize), METH_FASTCALL, nullptr},
    {"engine_new", fast(engine_new), METH_FASTCALL, nullptr},
    {"engine_isa", engine_isa, METH_O, nullptr},
    {"engine_first_touch", fast(engine_first_touch), METH_FASTCALL, nullptr},
    {"engine_read_weights", fast(engine_read_weights), METH_FASTCALL, nullptr},
    {"forward", fast(forward), METH_FASTCALL, nullptr},
    {"shard_new", fast(shard_new), METH_FASTCALL, nullptr},
    {"crc32c", fast(crc32c), METH_FASTCALL, nullptr},
    {"supported_isas", supported_isas, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_kernel",
                       "See vllm_duck.executor.kernel.",
                       -1,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernel() {
  PyObject* errors = PyImport_ImportModule("vllm_duck.errors");
  if (!errors) return nullptr;
  shape_error = PyObject_GetAttrString(errors, "DuckShapeError");
  checkpoint_error = PyObject_GetAttrString(errors, "DuckCheckpointError");
  Py_DECREF(errors);
  if (!shape_error || !checkpoint_error) return nullptr;
  return PyModule_Create(&kModule);
}
