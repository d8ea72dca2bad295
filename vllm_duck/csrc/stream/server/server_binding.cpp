// The server to Python; executor/native/server.py is its only user and has checked
// plain numbers.
#include <memory>

#include "stream/server/server.h"
#include "stream/stream_module.h"

namespace duck::stream {
namespace {

using namespace duck::binding;

constexpr const char* kServerName = "vllm_duck.StreamServer";

// A server, and the capsule of what it computes with.
struct HeldServer {
  HeldServer(const ServerOptions& options, PyObject* compute)
      : server(std::make_unique<Server>(options)), compute(Py_NewRef(compute)) {}
  std::unique_ptr<Server> server;
  PyObject* compute;
};

void destroy_server(PyObject* capsule) {
  auto* held = from_capsule<HeldServer>(capsule, kServerName);
  {
    WithoutGil released;
    held->server.reset();
  }
  Py_DECREF(held->compute);
  delete held;
}

// server_new(listeners, compute, authorization, identity, max_message_bytes, max_calls)
// -> server
PyObject* server_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 6)) return nullptr;
  ServerOptions options;
  for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); ++i)
    options.listeners.push_back(int(PyLong_AsLong(PyTuple_GetItem(args[0], i))));
  auto* compute = from_capsule<Compute>(args[1], kComputeName);
  if (!compute || !read_string(args[2], &options.authorization) ||
      !read_string(args[3], &options.identity))
    return nullptr;
  options.compute = *compute;
  options.max_message_bytes = PyLong_AsSize_t(args[4]);
  options.max_calls = PyLong_AsSize_t(args[5]);
  if (PyErr_Occurred()) return nullptr;
  return PyCapsule_New(new HeldServer(options, args[1]), kServerName, destroy_server);
}

PyObject* server_start(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldServer>(capsule, kServerName);
  if (!held) return nullptr;
  held->server->start();
  Py_RETURN_NONE;
}

// server_stop(server, grace_s)
PyObject* server_stop(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* held = from_capsule<HeldServer>(args[0], kServerName);
  double grace_s = PyFloat_AsDouble(args[1]);
  if (!held || PyErr_Occurred()) return nullptr;
  {
    WithoutGil released;
    held->server->stop(grace_s);
  }
  Py_RETURN_NONE;
}

// server_next_event(server) -> (call id, kind, method, message), or None at the end;
// kinds: see ControlEvent
PyObject* server_next_event(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldServer>(capsule, kServerName);
  if (!held) return nullptr;
  ControlEvent event;
  bool is_event;
  {
    WithoutGil released;
    is_event = held->server->next_event(&event);
  }
  if (!is_event) Py_RETURN_NONE;
  return Py_BuildValue("(KiNN)", static_cast<unsigned long long>(event.call_id),
                       int(event.kind), to_text(event.method),
                       to_bytes(event.message.data(), event.message.size()));
}

// server_send(server, call id, message)
PyObject* server_send(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 3)) return nullptr;
  auto* held = from_capsule<HeldServer>(args[0], kServerName);
  unsigned long long call_id = PyLong_AsUnsignedLongLong(args[1]);
  BytesView message;
  if (!held || PyErr_Occurred() || !message.get(args[2])) return nullptr;
  held->server->send(call_id, make_payload(message.data(), message.size()));
  Py_RETURN_NONE;
}

// server_finish(server, call id, status code, text)
PyObject* server_finish(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 4)) return nullptr;
  auto* held = from_capsule<HeldServer>(args[0], kServerName);
  unsigned long long call_id = PyLong_AsUnsignedLongLong(args[1]);
  Status status;
  status.code = int(PyLong_AsLong(args[2]));
  if (!held || PyErr_Occurred() || !read_string(args[3], &status.text)) return nullptr;
  held->server->finish(call_id, status);
  Py_RETURN_NONE;
}

PyObject* echo_duck(PyObject*, PyObject*) {
  static Compute compute = echo_compute();
  return PyCapsule_New(&compute, kComputeName, nullptr);
}

}  // namespace

std::vector<PyMethodDef> server_functions() {
  return {
      fast<server_new>("server_new"),
      single<server_start>("server_start"),
      fast<server_stop>("server_stop"),
      single<server_next_event>("server_next_event"),
      fast<server_send>("server_send"),
      fast<server_finish>("server_finish"),
      no_args<echo_duck>("echo_compute"),
  };
}

}  // namespace duck::stream
