// vllm_duck.models.cpu._host, for the modules of models/cpu/, which check shapes,
// dtypes and layouts: nothing here does. Pointers are integers (data_ptr()) or buffers.
#include "base/binding.h"
#include "host/host.h"
#include "host/weights.h"

namespace {

using namespace duck::binding;
using namespace duck::host;

template <class T>
struct CapsuleName;
template <>
struct CapsuleName<Host> {
  static constexpr const char* value = "vllm_duck.Host";
};
template <>
struct CapsuleName<Step> {
  static constexpr const char* value = "vllm_duck.Step";
};
template <>
struct CapsuleName<Norm> {
  static constexpr const char* value = "vllm_duck.Norm";
};
template <>
struct CapsuleName<Linear> {
  static constexpr const char* value = "vllm_duck.Linear";
};
template <>
struct CapsuleName<Mlp> {
  static constexpr const char* value = "vllm_duck.Mlp";
};
template <>
struct CapsuleName<Router> {
  static constexpr const char* value = "vllm_duck.Router";
};
template <>
struct CapsuleName<Attention> {
  static constexpr const char* value = "vllm_duck.Attention";
};

// The arguments of a call, read one after the other; the first mistake sticks.
class Arguments {
 public:
  Arguments(PyObject* const* args, Py_ssize_t count) : args_(args), left_(count) {}

  // True if all were read and none was wrong; sets the Python error otherwise.
  bool done() {
    if (!failed_ && left_ != 0) fail("too many arguments");
    return !failed_;
  }

  template <class T>
  T* object() {
    PyObject* arg = next();
    if (!arg) return nullptr;
    auto* found = static_cast<T*>(PyCapsule_GetPointer(arg, CapsuleName<T>::value));
    failed_ |= !found;
    return found;
  }

  template <class T>
  T* pointer() {
    PyObject* arg = next();
    if (!arg) return nullptr;
    if (PyLong_Check(arg)) {
      void* at = PyLong_AsVoidPtr(arg);
      failed_ |= !at && PyErr_Occurred();
      return static_cast<T*>(at);
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(arg, &buffer, PyBUF_SIMPLE) < 0) {
      failed_ = true;
      return nullptr;
    }
    // The caller's reference keeps the memory for the time of the call.
    void* at = buffer.buf;
    PyBuffer_Release(&buffer);
    return static_cast<T*>(at);
  }

  int integer() {
    PyObject* arg = next();
    long value = arg ? PyLong_AsLong(arg) : 0;
    failed_ |= value == -1 && PyErr_Occurred();
    return int(value);
  }

  float real() {
    PyObject* arg = next();
    double value = arg ? PyFloat_AsDouble(arg) : 0;
    failed_ |= value == -1 && PyErr_Occurred();
    return float(value);
  }

  const char* text() {
    PyObject* arg = next();
    const char* value = arg ? PyUnicode_AsUTF8AndSize(arg, nullptr) : nullptr;
    failed_ |= !value;
    return value;
  }

 private:
  PyObject* next() {
    if (!failed_ && left_ == 0) fail("too few arguments");
    if (failed_) return nullptr;
    --left_;
    return *args_++;
  }
  void fail(const char* message) {
    PyErr_SetString(PyExc_TypeError, message);
    failed_ = true;
  }

  PyObject* const* args_;
  Py_ssize_t left_;
  bool failed_ = false;
};

// make() -> a new T in a capsule.
template <class T, class Make>
PyObject* new_object(Arguments& args, const Make& make) {
  if (!args.done()) return nullptr;
  return PyCapsule_New(make(), CapsuleName<T>::value, destroy<T>);
}

template <class Call>
PyObject* run(Arguments& args, Host* host,
              void (*Calls::*entry)(const Threads&, const Call&), const Call& call) {
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    host->run(entry, call);
  }
  Py_RETURN_NONE;
}

PyObject* host_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  int num_threads = args.integer();
  const char* isa = args.text();
  int work_per_thread = args.integer();
  if (!args.done()) return nullptr;
  const Calls* calls = find_calls(isa);
  if (!calls) Py_RETURN_NONE;
  return new_object<Host>(
      args, [&] { return new Host(calls, num_threads, work_per_thread); });
}

PyObject* host_isa(PyObject*, PyObject* capsule) {
  auto* host =
      static_cast<Host*>(PyCapsule_GetPointer(capsule, CapsuleName<Host>::value));
  return host ? PyUnicode_FromString(host->isa()) : nullptr;
}

// The most scratch memory that calls of this host have held at once, in bytes.
PyObject* host_scratch_bytes(PyObject*, PyObject* capsule) {
  auto* host =
      static_cast<Host*>(PyCapsule_GetPointer(capsule, CapsuleName<Host>::value));
  return host ? PyLong_FromSize_t(host->most_scratch_bytes()) : nullptr;
}

PyObject* supported_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (auto* calls : supported_calls()) {
    PyObject* name = PyUnicode_FromString(calls->name);
    if (names && name) PyList_Append(names, name);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* step_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  int num_requests = args.integer(), block_size = args.integer();
  auto* row_begin = args.pointer<int32_t>();
  auto* first_visible = args.pointer<int32_t>();
  auto* slots = args.pointer<int64_t>();
  auto* table = args.pointer<int32_t>();
  int table_stride = args.integer();
  return new_object<Step>(args, [&] {
    return new Step(num_requests, block_size, row_begin, first_visible, slots, table,
                    table_stride);
  });
}

PyObject* norm_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* weight = args.pointer<float>();
  int size = args.integer();
  float eps = args.real();
  return new_object<Norm>(args, [&] {
    return new Norm{std::vector<float>(weight, weight + size), eps};
  });
}

PyObject* linear_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* weight = args.pointer<uint16_t>();
  int n = args.integer(), k = args.integer();
  return new_object<Linear>(args, [&] {
    PackedMatrix packed(n, k);
    packed.pack({weight, size_t(k), 1});
    return new Linear{std::move(packed)};
  });
}

PyObject* mlp_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* gate = args.pointer<uint16_t>();
  auto* up = args.pointer<uint16_t>();
  auto* down = args.pointer<uint16_t>();
  int hidden = args.integer(), columns = args.integer();
  return new_object<Mlp>(args, [&] {
    PackedMatrix packed_down(hidden, columns);
    packed_down.pack({down, size_t(columns), 1});
    return new Mlp{pack_gate_up({gate, size_t(hidden), 1}, {up, size_t(hidden), 1},
                                columns, hidden),
                   std::move(packed_down), columns};
  });
}

PyObject* router_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* weight = args.pointer<float>();
  auto* bias = args.pointer<float>();
  RouterShape shape;
  shape.hidden = args.integer();
  shape.num_experts = args.integer();
  shape.topk = args.integer();
  shape.num_groups = args.integer();
  shape.topk_groups = args.integer();
  shape.normalize = args.integer() != 0;
  shape.scale = args.real();
  return new_object<Router>(args, [&] { return new Router(shape, weight, bias); });
}

PyObject* attention_new(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  AttentionShape shape;
  shape.hidden = args.integer();
  shape.heads = args.integer();
  shape.q_lora = args.integer();
  shape.kv_lora = args.integer();
  shape.nope_dim = args.integer();
  shape.rope_dim = args.integer();
  shape.v_dim = args.integer();
  shape.index_heads = args.integer();
  shape.index_dim = args.integer();
  shape.index_topk = args.integer();
  shape.is_fp8 = args.integer() != 0;
  shape.scale = args.real();
  shape.index_scale = args.real();
  float eps = args.real(), index_eps = args.real();
  Attention::Weights weights;
  weights.down = args.pointer<uint16_t>();
  weights.up = args.pointer<uint16_t>();
  weights.kv_b = args.pointer<uint16_t>();
  weights.out = args.pointer<uint16_t>();
  weights.input_norm = args.pointer<float>();
  weights.q_norm = args.pointer<float>();
  weights.kv_norm = args.pointer<float>();
  weights.output_norm = args.pointer<float>();
  weights.index_norm = args.pointer<float>();
  weights.index_bias = args.pointer<float>();
  return new_object<Attention>(
      args, [&] { return new Attention(shape, eps, index_eps, weights); });
}

// norm(host, norm, rows, x, out)
PyObject* norm(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  auto* weights = args.object<Norm>();
  NormCall call = {};
  call.rows = args.integer();
  call.x = args.pointer<uint16_t>();
  call.out = args.pointer<uint16_t>();
  if (weights) call.norm = weights->view();
  if (weights) call.size = int(weights->weight.size());
  return run(args, host, &Calls::norm, call);
}

// linear(host, linear, rows, x, is_bf16, out)
PyObject* linear(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  auto* weights = args.object<Linear>();
  LinearCall call = {};
  call.rows = args.integer();
  call.x = args.pointer<uint16_t>();
  call.is_bf16 = args.integer() != 0;
  call.out = args.pointer<void>();
  if (weights) call.weight = weights->weight.view();
  return run(args, host, &Calls::linear, call);
}

// mlp(host, mlp, rows, x, residual or 0, out)
PyObject* mlp(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  auto* weights = args.object<Mlp>();
  MlpCall call = {};
  call.rows = args.integer();
  call.x = args.pointer<uint16_t>();
  call.residual = args.pointer<uint16_t>();
  auto* out = args.pointer<void>();
  call.out_bf16 = static_cast<uint16_t*>(out);
  call.out_float = static_cast<float*>(out);
  if (weights) {
    call.gate_up = weights->gate_up.view();
    call.down = weights->down.view();
    call.columns = weights->columns;
  }
  return run(args, host, &Calls::mlp, call);
}

// route(host, router, rows, x, ids, weights)
PyObject* route(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  auto* router = args.object<Router>();
  RouterCall call = router ? router->call() : RouterCall{};
  call.rows = args.integer();
  call.x = args.pointer<uint16_t>();
  call.ids = args.pointer<int32_t>();
  call.weights = args.pointer<float>();
  return run(args, host, &Calls::route, call);
}

// add(host, size, residual, shared, routed, out)
PyObject* add(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  AddCall call = {};
  call.size = size_t(args.integer());
  call.residual = args.pointer<uint16_t>();
  call.shared = args.pointer<float>();
  call.routed = args.pointer<float>();
  call.out = args.pointer<uint16_t>();
  return run(args, host, &Calls::add, call);
}

// attend(host, attention, step, rows, hidden, rotations, latent_cache, index_cache,
//        residual, normed)
PyObject* attend(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  auto* attention = args.object<Attention>();
  auto* step = args.object<Step>();
  AttentionCall call = {};
  call.rows = args.integer();
  call.hidden = args.pointer<uint16_t>();
  call.rotations = args.pointer<float>();
  call.latent_cache = args.pointer<uint8_t>();
  call.index_cache = args.pointer<uint8_t>();
  call.residual = args.pointer<uint16_t>();
  call.normed = args.pointer<uint16_t>();
  if (attention) call.layer = attention->view();
  if (step) call.step = step->view();
  return run(args, host, &Calls::attend, call);
}

// latent(host, size, x or 0, row, out)
PyObject* latent(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  Arguments args(argv, argc);
  auto* host = args.object<Host>();
  LatentCall call = {};
  call.size = args.integer();
  call.x = args.pointer<float>();
  call.row = args.pointer<uint8_t>();
  call.out = args.pointer<uint16_t>();
  return run(args, host, &Calls::latent, call);
}

}  // namespace

PyMODINIT_FUNC PyInit__host() {
  return make_module("_host", "See vllm_duck.models.cpu.",
                     {
                         no_args<supported_isas>("supported_isas"),
                         fast<host_new>("host_new"),
                         single<host_isa>("host_isa"),
                         single<host_scratch_bytes>("host_scratch_bytes"),
                         fast<step_new>("step_new"),
                         fast<norm_new>("norm_new"),
                         fast<linear_new>("linear_new"),
                         fast<mlp_new>("mlp_new"),
                         fast<router_new>("router_new"),
                         fast<attention_new>("attention_new"),
                         fast<norm>("norm"),
                         fast<linear>("linear"),
                         fast<mlp>("mlp"),
                         fast<route>("route"),
                         fast<add>("add"),
                         fast<attend>("attend"),
                         fast<latent>("latent"),
                     });
}
