// What a duck computes with, to Python: an engine and its threads, and a shard for the
// native stream. kernel.py is the only user and has checked plain numbers already;
// buffers, ids and weights are checked here.
#include <memory>

#include "duck/engine.h"
#include "duck/kernel_module.h"
#include "duck/kernels/dispatch.h"
#include "duck/shard.h"

namespace duck {
namespace {

using namespace duck::binding;

constexpr const char* kEngineName = "vllm_duck.Engine";

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
  const KernelTable* kernels = find_kernels(isa);
  if (!kernels) Py_RETURN_NONE;
  return PyCapsule_New(new Engine(kernels, num_threads, cpus), kEngineName,
                       destroy<Engine>);
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
PyObject* engine_forward(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 8)) return nullptr;
  auto* engine = from_capsule<Engine>(args[0], kEngineName);
  auto* layer = engine ? from_capsule<Layer>(args[1], kLayerName) : nullptr;
  int range[2];
  if (!layer || !read_ints(args + 5, 2, range)) return nullptr;
  ArrayView hidden, ids, weights, out;
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
  Call call = {layer,
               hidden.data<uint16_t>(),
               ids.data<int32_t>(),
               weights.data<float>(),
               int(num_tokens),
               int(topk),
               range[0],
               is_fp32 ? out.data<float>() : nullptr,
               is_fp32 ? nullptr : out.data<uint16_t>()};
  {
    WithoutGil released;
    engine->forward(call);
  }
  Py_RETURN_NONE;
}

// A shard's Compute, and the capsules of what it computes with.
struct OwnedShard {
  OwnedShard(PyObject* engine, PyObject* layers, Engine* pointer, int expert_lo,
             int n_routed_experts)
      : shard(pointer, expert_lo, n_routed_experts),
        compute{&shard, Shard::forward},
        engine(Py_NewRef(engine)),
        layers(Py_NewRef(layers)) {}
  ~OwnedShard() {
    Py_DECREF(engine);
    Py_DECREF(layers);
  }

  Shard shard;
  Compute compute;
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
      PyErr_Format(checkpoint_error, "expert %d of the shard was never loaded",
                   missing);
      return nullptr;
    }
    owned->shard.add(uint32_t(layer_idx), layer);
  }
  PyObject* capsule = PyCapsule_New(&owned->compute, kComputeName, destroy_shard);
  if (capsule) PyCapsule_SetContext(capsule, owned.release());
  return capsule;
}

}  // namespace

std::vector<PyMethodDef> engine_functions() {
  return {
      fast<engine_new>("engine_new"),
      single<engine_isa>("engine_isa"),
      fast<engine_first_touch>("engine_first_touch"),
      fast<engine_read_weights>("engine_read_weights"),
      fast<engine_forward>("forward"),
      fast<shard_new>("shard_new"),
  };
}

}  // namespace duck
