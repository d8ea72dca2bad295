// The server to Python; executor/native/server.py is its only user and has checked
// plain numbers.
#include <memory>

#include "stream/server/server.h"
#include "stream/stream_module.h"

namespace duck::stream {
namespace {

// A server, and the capsule of what it computes with.
struct HeldServer {
  HeldServer(const ServerOptions& options, PyObject* compute)
      : server(std::make_unique<Server>(options)), compute(Py_NewRef(compute)) {}
  HeldServer(const HeldServer&) = delete;
  ~HeldServer() {
    {
      binding::WithoutGil released;
      server.reset();
    }
    Py_DECREF(compute);
  }

  std::unique_ptr<Server> server;
  PyObject* compute;
};

}  // namespace
}  // namespace duck::stream

template <>
inline constexpr const char* duck::binding::capsule_name<duck::stream::HeldServer> =
    "vllm_duck.StreamServer";

namespace duck::stream {
namespace {

using namespace duck::binding;

// -> server
PyObject* server_new(Arguments& args) {
  ServerOptions options;
  options.listeners = args.integers("listeners");
  PyObject* compute = args.object("compute");
  options.authorization = args.text("authorization");
  options.identity = args.text("identity");
  options.max_message_bytes = args.u64("max_message_bytes");
  options.max_calls = args.u64("max_calls");
  options.tls = tls_argument(args);
  if (!args.done()) return nullptr;
  auto* pointer = static_cast<Compute*>(PyCapsule_GetPointer(compute, kComputeName));
  if (!pointer) return nullptr;
  options.compute = *pointer;
  return to_capsule(std::make_unique<HeldServer>(options, compute));
}

PyObject* server_start(Arguments& args) {
  auto* held = args.held<HeldServer>("server");
  if (!args.done()) return nullptr;
  held->server->start();
  Py_RETURN_NONE;
}

PyObject* server_stop(Arguments& args) {
  auto* held = args.held<HeldServer>("server");
  double grace_s = args.real("grace_s");
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    held->server->stop(grace_s);
  }
  Py_RETURN_NONE;
}

// -> (call id, kind, method, message), or None at the end; kinds: see ControlEvent
PyObject* server_next_event(Arguments& args) {
  auto* held = args.held<HeldServer>("server");
  if (!args.done()) return nullptr;
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

PyObject* server_send(Arguments& args) {
  auto* held = args.held<HeldServer>("server");
  uint64_t call_id = args.u64("call_id");
  BytesView message;
  args.bytes("message", &message);
  if (!args.done()) return nullptr;
  held->server->send(call_id, make_payload(message.data<void>(), message.size()));
  Py_RETURN_NONE;
}

PyObject* server_finish(Arguments& args) {
  auto* held = args.held<HeldServer>("server");
  uint64_t call_id = args.u64("call_id");
  Status status;
  status.code = args.integer("status");
  status.text = args.text("text");
  if (!args.done()) return nullptr;
  held->server->finish(call_id, status);
  Py_RETURN_NONE;
}

}  // namespace

std::vector<PyMethodDef> server_functions() {
  return {
      method<server_new>("server_new"),
      method<server_start>("server_start"),
      method<server_stop>("server_stop"),
      method<server_next_event>("server_next_event"),
      method<server_send>("server_send"),
      method<server_finish>("server_finish"),
  };
}

}  // namespace duck::stream
