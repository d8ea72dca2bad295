// What the host computes, to Python: the pieces of a layer.
#include "host/host_module.h"

namespace duck::host {
namespace {

using namespace duck::binding;

template <class Call>
PyObject* run(Arguments& args, Host* host,
              void (*HostKernels::*kernel)(const Threads&, const Call&),
              const Call& call) {
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    host->run(kernel, call);
  }
  Py_RETURN_NONE;
}

PyObject* norm(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* weights = args.held<Norm>("norm");
  NormCall call = {};
  call.rows = args.integer("rows");
  call.x = args.memory<uint16_t>("x");
  call.out = args.memory<uint16_t>("out");
  if (weights) call.norm = weights->view();
  if (weights) call.size = int(weights->weight.size());
  return run(args, host, &HostKernels::norm, call);
}

PyObject* linear(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* weights = args.held<Linear>("linear");
  LinearCall call = {};
  call.rows = args.integer("rows");
  call.x = args.memory<uint16_t>("x");
  call.is_bf16 = args.truth("is_bf16");
  call.out = args.memory<void>("out");
  if (weights) call.weight = weights->weight.view();
  return run(args, host, &HostKernels::linear, call);
}

// residual may be 0; then out is fp32
PyObject* mlp(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* weights = args.held<Mlp>("mlp");
  MlpCall call = {};
  call.rows = args.integer("rows");
  call.x = args.memory<uint16_t>("x");
  call.residual = args.memory<uint16_t>("residual");
  auto* out = args.memory<void>("out");
  call.out_bf16 = static_cast<uint16_t*>(out);
  call.out_float = static_cast<float*>(out);
  if (weights) {
    call.gate_up = weights->gate_up.view();
    call.down = weights->down.view();
    call.columns = weights->columns;
  }
  return run(args, host, &HostKernels::mlp, call);
}

PyObject* route(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* router = args.held<Router>("router");
  RouterCall call = router ? router->call() : RouterCall{};
  call.rows = args.integer("rows");
  call.x = args.memory<uint16_t>("x");
  call.ids = args.memory<int32_t>("ids");
  call.weights = args.memory<float>("weights");
  return run(args, host, &HostKernels::route, call);
}

PyObject* add(Arguments& args) {
  auto* host = args.held<Host>("host");
  AddCall call = {};
  call.size = size_t(args.integer("size"));
  call.residual = args.memory<uint16_t>("residual");
  call.shared = args.memory<float>("shared");
  call.routed = args.memory<float>("routed");
  call.out = args.memory<uint16_t>("out");
  return run(args, host, &HostKernels::add, call);
}

PyObject* attend(Arguments& args) {
  auto* host = args.held<Host>("host");
  auto* attention = args.held<Attention>("attention");
  auto* step = args.held<Step>("step");
  AttentionCall call = {};
  call.rows = args.integer("rows");
  call.hidden = args.memory<uint16_t>("hidden");
  call.rotations = args.memory<float>("rotations");
  call.latent_cache = args.memory<uint8_t>("latent_cache");
  call.index_cache = args.memory<uint8_t>("index_cache");
  call.chosen = args.memory<int32_t>("chosen");
  call.is_chosen = args.truth("is_chosen");
  call.residual = args.memory<uint16_t>("residual");
  call.normed = args.memory<uint16_t>("normed");
  if (attention) call.layer = attention->view();
  if (step) call.step = step->view();
  return run(args, host, &HostKernels::attend, call);
}

}  // namespace

std::vector<PyMethodDef> layer_functions() {
  return {
      method<norm>("norm"),   method<linear>("linear"), method<mlp>("mlp"),
      method<route>("route"), method<add>("add"),       method<attend>("attend"),
  };
}

}  // namespace duck::host
