// What a duck computes with, to Python: an engine and its threads, and a shard for the
// native stream. Buffers, ids and weights are checked here, plain numbers by kernel.py,
// the only user.
#include "duck/engine.h"
#include "duck/kernel_module.h"
#include "duck/shard.h"

namespace duck {

template <>
inline constexpr const char* binding::capsule_name<Engine> = "vllm_duck.Engine";

namespace {

using namespace duck::binding;

bool require_complete(const Layer& layer) {
  int missing = layer.first_missing();
  if (missing >= 0)
    PyErr_Format(checkpoint_error, "expert %d of the shard was never loaded", missing);
  return missing < 0;
}

// -> names, best first
PyObject* supported_isas(Arguments& args) {
  if (!args.done()) return nullptr;
  auto tables = supported_kernels();
  return make_list(tables.size(), [&](size_t i) { return to_text(tables[i]->name); });
}

// -> engine, or None if the CPU lacks the isa; an empty one is the best
PyObject* engine_new(Arguments& args) {
  int num_threads = args.integer("num_threads");
  std::string isa = args.text("isa");
  std::vector<int> cpus = args.integers("cpus");
  if (!args.done()) return nullptr;
  const KernelTable* kernels = find(supported_kernels(), isa);
  if (!kernels) Py_RETURN_NONE;
  return to_capsule(std::make_unique<Engine>(kernels, num_threads, cpus));
}

PyObject* engine_isa(Arguments& args) {
  auto* engine = args.held<Engine>("engine");
  return args.done() ? to_text(engine->isa()) : nullptr;
}

PyObject* engine_first_touch(Arguments& args) {
  auto* engine = args.held<Engine>("engine");
  auto* layer = args.held<Layer>("layer");
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    engine->first_touch(layer);
  }
  Py_RETURN_NONE;
}

// Writes the partial sum to out.
PyObject* forward(Arguments& args) {
  auto* engine = args.held<Engine>("engine");
  auto* layer = args.held<Layer>("layer");
  if (!args.good()) return nullptr;
  Py_ssize_t hidden_size = layer->shape().hidden_size;
  ArrayView hidden, ids, weights, out;
  if (!args.array("hidden", &hidden, "H", {-1, hidden_size})) return nullptr;
  Py_ssize_t num_rows = hidden.size(0);
  if (!args.array("topk_ids", &ids, "il", {num_rows, -1})) return nullptr;
  args.array("topk_weights", &weights, "f", {num_rows, ids.size(1)});
  int expert_lo = args.integer("expert_lo");
  int n_routed_experts = args.integer("n_routed_experts");
  args.array("out", &out, "fH", {num_rows, hidden_size}, PyBUF_WRITABLE);
  if (!args.done()) return nullptr;
  ForwardCall call = {};
  call.num_rows = uint32_t(num_rows);
  call.num_topk = uint32_t(ids.size(1));
  call.hidden = hidden.data<uint16_t>();
  call.topk_ids = ids.data<int32_t>();
  call.topk_weights = weights.data<float>();
  if (out.code() == 'f')
    call.out_fp32 = out.data<float>();
  else
    call.out_bf16 = out.data<uint16_t>();
  std::string problem = misfit(call, n_routed_experts);
  if (!problem.empty()) {
    PyErr_SetString(shape_error, problem.c_str());
    return nullptr;
  }
  if (!require_complete(*layer)) return nullptr;
  {
    WithoutGil released;
    engine->forward({call, layer, expert_lo});
  }
  Py_RETURN_NONE;
}

// A shard's Compute, and the capsules of what it computes with.
struct OwnedShard {
  OwnedShard(PyObject* engine, PyObject* layers, const Shard& shard)
      : shard(shard),
        compute{&this->shard, Shard::forward},
        engine(Py_NewRef(engine)),
        layers(Py_NewRef(layers)) {}
  OwnedShard(const OwnedShard&) = delete;
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

// Layers are {layer_idx: layer} -> the shard's Compute
PyObject* shard_new(Arguments& args) {
  PyObject* engine_capsule = args.object("engine");
  PyObject* layers = args.object("layers");
  int expert_lo = args.integer("expert_lo");
  int n_routed_experts = args.integer("n_routed_experts");
  if (!args.done()) return nullptr;
  auto* engine = from_capsule<Engine>(engine_capsule);
  if (!engine) return nullptr;
  Shard shard(engine, expert_lo, n_routed_experts);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(layers, &position, &key, &value)) {
    long layer_idx = PyLong_AsLong(key);
    auto* layer = from_capsule<Layer>(value);
    if (PyErr_Occurred() || !require_complete(*layer)) return nullptr;
    shard.add(uint32_t(layer_idx), layer);
  }
  auto owned = std::make_unique<OwnedShard>(engine_capsule, layers, shard);
  PyObject* capsule = PyCapsule_New(&owned->compute, kComputeName, destroy_shard);
  if (capsule) PyCapsule_SetContext(capsule, owned.release());
  return capsule;
}

}  // namespace

std::vector<PyMethodDef> engine_functions() {
  return {
      method<supported_isas>("supported_isas"),
      method<engine_new>("engine_new"),
      method<engine_isa>("engine_isa"),
      method<engine_first_touch>("engine_first_touch"),
      method<forward>("forward"),
      method<shard_new>("shard_new"),
  };
}

}  // namespace duck
