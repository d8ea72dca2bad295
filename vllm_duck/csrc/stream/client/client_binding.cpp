// The client to Python; executor/native/client.py is its only user and has checked
// plain numbers.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "stream/client/client.h"
#include "stream/stream_module.h"

namespace duck::stream {
namespace {

using namespace duck::binding;

constexpr const char* kClientName = "vllm_duck.StreamClient";
constexpr const char* kTicketName = "vllm_duck.StreamTicket";

using ClientRef = std::shared_ptr<Client>;

// A ticket keeps its client alive: Python may drop them in any order.
struct HeldTicket {
  ClientRef client;
  TicketRef ticket;
};

bool read_u32s(PyObject* const* args, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = uint32_t(PyLong_AsUnsignedLong(args[i]));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

bool read_strings(PyObject* tuple, std::vector<std::string>* out) {
  out->resize(size_t(PyTuple_Size(tuple)));
  for (size_t i = 0; i < out->size(); ++i)
    if (!read_string(PyTuple_GetItem(tuple, Py_ssize_t(i)), &(*out)[i])) return false;
  return true;
}

void destroy_ticket(PyObject* capsule) {
  auto* held = from_capsule<HeldTicket>(capsule, kTicketName);
  try {
    held->client->forget(held->ticket.get());
  } catch (const std::bad_alloc&) {
    // A late reply then finds nobody; nothing may be thrown from here.
  }
  delete held;
}

Clock::duration duration_of(PyObject* seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(PyFloat_AsDouble(seconds)));
}

PyObject* to_tuple(int duck, const Failure& what) {
  return Py_BuildValue("(iiiN)", duck, int(what.kind), what.code, to_text(what.text));
}

// client_new(endpoints, identities, authorization, deadline_s, recover_s, quiet_s,
//            is_fp32) -> client
PyObject* client_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 7)) return nullptr;
  ClientOptions options;
  if (!read_strings(args[0], &options.endpoints) ||
      !read_strings(args[1], &options.identities) ||
      !read_string(args[2], &options.authorization))
    return nullptr;
  options.patience.deadline = duration_of(args[3]);
  options.patience.recover = duration_of(args[4]);
  options.patience.quiet = duration_of(args[5]);
  options.reply_dtype = PyObject_IsTrue(args[6]) ? DType::kF32 : DType::kBf16;
  if (PyErr_Occurred()) return nullptr;
  return PyCapsule_New(new ClientRef(std::make_shared<Client>(options)), kClientName,
                       destroy<ClientRef>);
}

// client_start(client, layer_idx, num_rows, hidden_size, num_topk, hidden, topk_ids,
//              topk_weights) -> ticket, or None with too many in flight
PyObject* client_start(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  uint32_t sizes[4];
  if (!require_args(num_args, 8) || !read_u32s(args + 1, 4, sizes)) return nullptr;
  auto* client = from_capsule<ClientRef>(args[0], kClientName);
  if (!client) return nullptr;
  size_t rows = sizes[1];
  BytesView hidden, ids, weights;
  if (!hidden.get(args[5], rows * sizes[2] * 2) ||
      !ids.get(args[6], rows * sizes[3] * 4) ||
      !weights.get(args[7], rows * sizes[3] * 4))
    return nullptr;
  ForwardCall call = {sizes[0],
                      sizes[1],
                      sizes[2],
                      sizes[3],
                      static_cast<uint16_t*>(hidden.data()),
                      static_cast<int32_t*>(ids.data()),
                      static_cast<float*>(weights.data()),
                      nullptr,
                      nullptr};
  TicketRef ticket;
  {
    WithoutGil released;
    ticket = (*client)->start(call);
  }
  if (!ticket) Py_RETURN_NONE;
  return PyCapsule_New(new HeldTicket{*client, ticket}, kTicketName, destroy_ticket);
}

// client_begin_step(client, limit_s): see Client::begin_step
PyObject* client_begin_step(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* client = from_capsule<ClientRef>(args[0], kClientName);
  if (!client) return nullptr;
  auto limit = duration_of(args[1]);
  if (PyErr_Occurred()) return nullptr;
  {
    WithoutGil released;
    (*client)->begin_step(Clock::now() + limit);
  }
  Py_RETURN_NONE;
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
// wanted), or what failed: (duck index, kind, code, text), see ticket.h; or news of a
// duck in the same form, and the wait has not ended
PyObject* ticket_wait(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (!require_args(num_args, 2)) return nullptr;
  auto* held = from_capsule<HeldTicket>(args[0], kTicketName);
  if (!held) return nullptr;
  auto& ticket = *held->ticket;
  BytesView out;
  bool is_wanted = args[1] != Py_None;
  if (is_wanted && !out.get(args[1], size_t(ticket.num_rows) * ticket.hidden_size * 4,
                            PyBUF_WRITABLE))
    return nullptr;
  News news;
  auto waited = Client::Waited::kNotYet;
  while (waited != Client::Waited::kSettled) {
    {
      WithoutGil released;
      waited = held->client->wait(&ticket, &news);
      if (is_wanted && waited == Client::Waited::kSettled && ticket.failed_duck < 0)
        sum_partials(ticket, static_cast<float*>(out.data()));
    }
    if (waited == Client::Waited::kNews) return to_tuple(news.duck, news.what);
    // A lost duck is waited for long; a signal must not wait.
    if (waited == Client::Waited::kNotYet && PyErr_CheckSignals() != 0) return nullptr;
  }
  if (ticket.failed_duck < 0) Py_RETURN_NONE;
  return to_tuple(ticket.failed_duck, ticket.failure);
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

}  // namespace

std::vector<PyMethodDef> client_functions() {
  return {
      fast<client_new>("client_new"),
      fast<client_start>("client_start"),
      fast<client_begin_step>("client_begin_step"),
      single<client_close>("client_close"),
      single<client_statistics>("client_statistics"),
      single<ticket_is_done>("ticket_is_done"),
      fast<ticket_wait>("ticket_wait"),
      single<ticket_times>("ticket_times"),
      single<ticket_replies>("ticket_replies"),
  };
}

}  // namespace duck::stream
