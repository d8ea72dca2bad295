// vllm_duck.executor._stream: client and server of duck.proto on nghttp2. Its users are
// native_client.py and native_server.py, which have checked plain numbers already.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "client.h"
#include "server.h"

namespace {

using duck::Compute;
using duck::kComputeName;
using duck::stream::CallTimes;
using duck::stream::Client;
using duck::stream::ClientOptions;
using duck::stream::ControlEvent;
using duck::stream::DType;
using duck::stream::Server;
using duck::stream::ServerOptions;
using duck::stream::Slot;
using duck::stream::TicketRef;

constexpr const char* kClientName = "vllm_duck.StreamClient";
constexpr const char* kTicketName = "vllm_duck.StreamTicket";
constexpr const char* kServerName = "vllm_duck.StreamServer";

using ClientRef = std::shared_ptr<Client>;

// A ticket keeps its client alive: Python may drop them in any order.
struct HeldTicket {
  ClientRef client;
  TicketRef ticket;
};

// A server, and the capsule of what it computes with.
struct HeldServer {
  HeldServer(const ServerOptions& options, PyObject* compute)
      : server(std::make_unique<Server>(options)), compute(Py_NewRef(compute)) {}
  std::unique_ptr<Server> server;
  PyObject* compute;
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

// A C-contiguous Python buffer that is released with its scope.
class View {
 public:
  View() = default;
  ~View() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  bool get(PyObject* object, int flags = PyBUF_SIMPLE) {
    held_ = PyObject_GetBuffer(object, &buffer_, flags) == 0;
    return held_;
  }
  // Exactly this many bytes.
  bool get(PyObject* object, size_t num_bytes, int flags = PyBUF_SIMPLE) {
    if (!get(object, flags)) return false;
    if (size() == num_bytes) return true;
    PyErr_Format(PyExc_ValueError, "expected a buffer of %zu bytes, got %zu", num_bytes,
                 size());
    return false;
  }
  void* data() const { return buffer_.buf; }
  size_t size() const { return size_t(buffer_.len); }

 private:
  Py_buffer buffer_{};
  bool held_ = false;
};

template <class T>
T* from_capsule(PyObject* capsule, const char* name) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

bool require_args(Py_ssize_t got, Py_ssize_t expected) {
  if (got == expected) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
  return false;
}

PyObject* raise(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return PyErr_NoMemory();
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

bool read_string(PyObject* object, std::string* out) {
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text) out->assign(text, size_t(size));
  return text;
}

bool read_u32s(PyObject* const* args, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = uint32_t(PyLong_AsUnsignedLong(args[i]));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

PyObject* to_text(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace");
}

PyObject* to_bytes(const void* data, size_t size) {
  return PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size));
}

void destroy_client(PyObject* capsule) {
  delete from_capsule<ClientRef>(capsule, kClientName);
}

void destroy_ticket(PyObject* capsule) {
  auto* held = from_capsule<HeldTicket>(capsule, kTicketName);
  held->client->forget(held->ticket.get());
  delete held;
}

void destroy_server(PyObject* capsule) {
  auto* held = from_capsule<HeldServer>(capsule, kServerName);
  {
    WithoutGil released;
    held->server.reset();
  }
  Py_DECREF(held->compute);
  delete held;
}

// client_new(endpoints, authorization, deadline_s, quiet_s, is_fp32) -> client
PyObject* client_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 5)) return nullptr;
  ClientOptions options;
  options.endpoints.resize(size_t(PyTuple_Size(args[0])));
  for (size_t i = 0; i < options.endpoints.size(); ++i)
    if (!read_string(PyTuple_GetItem(args[0], Py_ssize_t(i)), &options.endpoints[i]))
      return nullptr;
  if (!read_string(args[1], &options.authorization)) return nullptr;
  options.deadline_s = PyFloat_AsDouble(args[2]);
  options.quiet_s = PyFloat_AsDouble(args[3]);
  options.reply_dtype = PyObject_IsTrue(args[4]) ? DType::kF32 : DType::kBf16;
  if (PyErr_Occurred()) return nullptr;
  try {
    return PyCapsule_New(new ClientRef(std::make_shared<Client>(options)), kClientName,
                         destroy_client);
  } catch (const std::exception& error) {
    return raise(error);
  }
}

// client_start(client, layer_idx, num_rows, hidden_size, num_topk, hidden, topk_ids,
//              topk_weights) -> ticket, or None with too many in flight
PyObject* client_start(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  uint32_t sizes[4];
  if (!require_args(num_args, 8) || !read_u32s(args + 1, 4, sizes)) return nullptr;
  auto* client = from_capsule<ClientRef>(args[0], kClientName);
  if (!client) return nullptr;
  size_t rows = sizes[1];
  View hidden, ids, weights;
  if (!hidden.get(args[5], rows * sizes[2] * 2) ||
      !ids.get(args[6], rows * sizes[3] * 4) ||
      !weights.get(args[7], rows * sizes[3] * 4))
    return nullptr;
  duck::ForwardCall call = {sizes[0],
                            sizes[1],
                            sizes[2],
                            sizes[3],
                            static_cast<uint16_t*>(hidden.data()),
                            static_cast<int32_t*>(ids.data()),
                            static_cast<float*>(weights.data()),
                            nullptr,
                            nullptr};
  try {
    TicketRef ticket;
    {
      WithoutGil released;
      ticket = (*client)->start(call);
    }
    if (!ticket) Py_RETURN_NONE;
    return PyCapsule_New(new HeldTicket{*client, ticket}, kTicketName, destroy_ticket);
  } catch (const std::exception& error) {
    return raise(error);
  }
}

PyObject* client_close(PyObject*, PyObject* capsule) {
  auto* client = from_capsule<ClientRef>(capsule, kClientName);
  if (!client) return nullptr;
  {
    WithoutGil released;
    (*client)->close();
  }
  Py_RETURN_NONE;
}

// client_statistics(client) -> [(number of calls, the latest as uint32 [N, 3]:
// rtt, compute, queue in microseconds)], one for each duck
PyObject* client_statistics(PyObject*, PyObject* capsule) {
  auto* client = from_capsule<ClientRef>(capsule, kClientName);
  if (!client) return nullptr;
  auto logs = (*client)->logs();
  PyObject* list = PyList_New(Py_ssize_t(logs.size()));
  for (size_t i = 0; list && i < logs.size(); ++i) {
    const auto& latest = logs[i].latest();
    PyObject* entry =
        Py_BuildValue("(KN)", static_cast<unsigned long long>(logs[i].num_calls()),
                      to_bytes(latest.data(), latest.size() * sizeof(CallTimes)));
    if (entry) {
      PyList_SetItem(list, Py_ssize_t(i), entry);
    } else {
      Py_CLEAR(list);
    }
  }
  return list;
}

PyObject* ticket_is_done(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldTicket>(capsule, kTicketName);
  if (!held) return nullptr;
  bool is_done;
  {
    WithoutGil released;
    is_done = held->client->is_done(held->ticket.get());
  }
  return PyBool_FromLong(is_done);
}

// ticket_wait(ticket, out) -> None, with the sum in out (float32 [T, H]; None: not
// wanted), or what failed: (duck index, kind, code, text), see ticket.h
PyObject* ticket_wait(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* held = from_capsule<HeldTicket>(args[0], kTicketName);
  if (!held) return nullptr;
  auto& ticket = *held->ticket;
  View out;
  bool is_wanted = args[1] != Py_None;
  if (is_wanted && !out.get(args[1], size_t(ticket.num_rows) * ticket.hidden_size * 4,
                            PyBUF_WRITABLE))
    return nullptr;
  {
    WithoutGil released;
    held->client->wait(&ticket);
    if (is_wanted && ticket.failed_duck < 0)
      duck::stream::sum_partials(ticket, static_cast<float*>(out.data()));
  }
  if (ticket.failed_duck < 0) Py_RETURN_NONE;
  return Py_BuildValue("(iiiN)", ticket.failed_duck, int(ticket.failure.kind),
                       ticket.failure.code, to_text(ticket.failure.text));
}

// ticket_times(ticket), after ticket_wait() has returned None
// -> (rtt_us, compute_us, link_us), of each the slowest duck's
PyObject* ticket_times(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldTicket>(capsule, kTicketName);
  if (!held) return nullptr;
  int64_t rtt_us = 0, compute_us = 0, link_us = INT64_MIN;
  for (const Slot& slot : held->ticket->slots) {
    int64_t rtt = slot.rtt_us, compute = slot.reply.compute_us;
    rtt_us = std::max(rtt_us, rtt);
    compute_us = std::max(compute_us, compute);
    link_us = std::max(link_us, rtt - compute - int64_t(slot.reply.queue_us));
  }
  return Py_BuildValue("(LLL)", static_cast<long long>(rtt_us),
                       static_cast<long long>(compute_us),
                       static_cast<long long>(link_us));
}

// ticket_replies(ticket), after ticket_wait() has returned None
// -> [(partial, queue_us, compute_us, rtt_us)] in duck order
PyObject* ticket_replies(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldTicket>(capsule, kTicketName);
  if (!held) return nullptr;
  const auto& slots = held->ticket->slots;
  PyObject* list = PyList_New(Py_ssize_t(slots.size()));
  for (size_t i = 0; list && i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    PyObject* entry = Py_BuildValue(
        "(NIII)", to_bytes(slot.reply.partial.data, slot.reply.partial.size),
        slot.reply.queue_us, slot.reply.compute_us, slot.rtt_us);
    if (entry) {
      PyList_SetItem(list, Py_ssize_t(i), entry);
    } else {
      Py_CLEAR(list);
    }
  }
  return list;
}

// server_new(listeners, compute, authorization, max_message_bytes, max_calls) -> server
PyObject* server_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 5)) return nullptr;
  ServerOptions options;
  for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); ++i)
    options.listeners.push_back(int(PyLong_AsLong(PyTuple_GetItem(args[0], i))));
  auto* compute = from_capsule<Compute>(args[1], kComputeName);
  if (!compute || !read_string(args[2], &options.authorization)) return nullptr;
  options.compute = *compute;
  options.max_message_bytes = PyLong_AsSize_t(args[3]);
  options.max_calls = PyLong_AsSize_t(args[4]);
  if (PyErr_Occurred()) return nullptr;
  try {
    return PyCapsule_New(new HeldServer(options, args[1]), kServerName, destroy_server);
  } catch (const std::exception& error) {
    return raise(error);
  }
}

PyObject* server_start(PyObject*, PyObject* capsule) {
  auto* held = from_capsule<HeldServer>(capsule, kServerName);
  if (!held) return nullptr;
  try {
    held->server->start();
  } catch (const std::exception& error) {
    return raise(error);
  }
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
  View message;
  if (!held || PyErr_Occurred() || !message.get(args[2])) return nullptr;
  held->server->send(call_id,
                     duck::stream::make_payload(message.data(), message.size()));
  Py_RETURN_NONE;
}

// server_finish(server, call id, status code, text)
PyObject* server_finish(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 4)) return nullptr;
  auto* held = from_capsule<HeldServer>(args[0], kServerName);
  unsigned long long call_id = PyLong_AsUnsignedLongLong(args[1]);
  duck::stream::Status status;
  status.code = int(PyLong_AsLong(args[2]));
  if (!held || PyErr_Occurred() || !read_string(args[3], &status.text)) return nullptr;
  held->server->finish(call_id, status);
  Py_RETURN_NONE;
}

PyObject* echo_compute(PyObject*, PyObject*) {
  static Compute compute = duck::stream::echo_compute();
  return PyCapsule_New(&compute, kComputeName, nullptr);
}

PyObject* nghttp2_version_text(PyObject*, PyObject*) {
  return PyUnicode_FromString(nghttp2_version(0)->version_str);
}

template <class Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"client_new", fast(client_new), METH_FASTCALL, nullptr},
    {"client_start", fast(client_start), METH_FASTCALL, nullptr},
    {"client_close", client_close, METH_O, nullptr},
    {"client_statistics", client_statistics, METH_O, nullptr},
    {"ticket_is_done", ticket_is_done, METH_O, nullptr},
    {"ticket_wait", fast(ticket_wait), METH_FASTCALL, nullptr},
    {"ticket_times", ticket_times, METH_O, nullptr},
    {"ticket_replies", ticket_replies, METH_O, nullptr},
    {"server_new", fast(server_new), METH_FASTCALL, nullptr},
    {"server_start", server_start, METH_O, nullptr},
    {"server_stop", fast(server_stop), METH_FASTCALL, nullptr},
    {"server_next_event", server_next_event, METH_O, nullptr},
    {"server_send", fast(server_send), METH_FASTCALL, nullptr},
    {"server_finish", fast(server_finish), METH_FASTCALL, nullptr},
    {"echo_compute", echo_compute, METH_NOARGS, nullptr},
    {"nghttp2_version", nghttp2_version_text, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_stream",
                       "See vllm_duck.executor.native_client and native_server.",
                       -1,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__stream() { return PyModule_Create(&kModule); }
