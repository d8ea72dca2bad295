// vllm_duck.models.cpu._host: the host's threads; weights and layers are beside it.
#include "host/host_module.h"

namespace {

using namespace duck::binding;
using namespace duck::host;

// -> names, best first
PyObject* supported_isas(Arguments& args) {
  if (!args.done()) return nullptr;
  auto tables = supported_kernels();
  return make_list(tables.size(), [&](size_t i) { return to_text(tables[i]->name); });
}

// -> host, or None if the CPU lacks the isa; an empty one is the best
PyObject* host_new(Arguments& args) {
  int num_threads = args.integer("num_threads");
  std::string isa = args.text("isa");
  int work_per_thread = args.integer("work_per_thread");
  if (!args.done()) return nullptr;
  const HostKernels* kernels = duck::find(supported_kernels(), isa);
  if (!kernels) Py_RETURN_NONE;
  return to_capsule(std::make_unique<Host>(kernels, num_threads, work_per_thread));
}

PyObject* host_isa(Arguments& args) {
  auto* host = args.held<Host>("host");
  return args.done() ? to_text(host->isa()) : nullptr;
}

}  // namespace

PyMODINIT_FUNC PyInit__host() {
  std::vector<PyMethodDef> functions = {
      method<supported_isas>("supported_isas"),
      method<host_new>("host_new"),
      method<host_isa>("host_isa"),
  };
  for (auto& function : weight_functions()) functions.push_back(function);
  for (auto& function : layer_functions()) functions.push_back(function);
  return make_module("_host", "See vllm_duck.models.cpu.", std::move(functions));
}
