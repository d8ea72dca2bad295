// The client to Python; executor/native/client.py is its only user and has checked
// plain numbers.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "base/call_arguments.h"
#include "stream/client/client.h"
#include "stream/stream_module.h"

namespace duck::stream {
namespace {

using ClientRef = std::shared_ptr<Client>;

// A ticket keeps its client alive: Python may drop them in any order.
struct HeldTicket {
  ClientRef client;
  TicketRef ticket;

  HeldTicket(const ClientRef& client, const TicketRef& ticket)
      : client(client), ticket(ticket) {}
  HeldTicket(const HeldTicket&) = delete;
  ~HeldTicket() {
    try {
      client->forget(ticket.get());
    } catch (const std::bad_alloc&) {
      // A late reply then finds nobody; nothing may be thrown from here.
    }
  }
};

}  // namespace
}  // namespace duck::stream

template <>
inline constexpr const char* duck::binding::capsule_name<duck::stream::ClientRef> =
    "vllm_duck.StreamClient";
template <>
inline constexpr const char* duck::binding::capsule_name<duck::stream::HeldTicket> =
    "vllm_duck.StreamTicket";

namespace duck::stream {
namespace {

using namespace duck::binding;

Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

PyObject* to_tuple(int duck, const Failure& what) {
  return Py_BuildValue("(iiiN)", duck, int(what.kind), what.code, to_text(what.text));
}

// -> client
PyObject* client_new(Arguments& args) {
  ClientOptions options;
  options.endpoints = args.texts("endpoints");
  options.identities = args.texts("identities");
  options.authorization = args.text("authorization");
  options.patience.deadline = duration(args.real("deadline_s"));
  options.patience.recover = duration(args.real("recover_s"));
  options.patience.quiet = duration(args.real("quiet_s"));
  options.reply_dtype = args.truth("is_fp32") ? DType::kF32 : DType::kBf16;
  options.tls = tls_argument(args);
  if (!args.done()) return nullptr;
  return to_capsule(std::make_unique<ClientRef>(std::make_shared<Client>(options)));
}

// -> ticket, or None with too many in flight
PyObject* client_start(Arguments& args) {
  auto* client = args.held<ClientRef>("client");
  CallArguments request(args);
  if (!args.done()) return nullptr;
  TicketRef ticket;
  {
    WithoutGil released;
    ticket = (*client)->start(request.call);
  }
  if (!ticket) Py_RETURN_NONE;
  return to_capsule(std::make_unique<HeldTicket>(*client, ticket));
}

// See Client::begin_step.
PyObject* client_begin_step(Arguments& args) {
  auto* client = args.held<ClientRef>("client");
  auto limit = duration(args.real("limit_s"));
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    (*client)->begin_step(Clock::now() + limit);
  }
  Py_RETURN_NONE;
}

PyObject* client_close(Arguments& args) {
  auto* client = args.held<ClientRef>("client");
  if (!args.done()) return nullptr;
  {
    WithoutGil released;
    (*client)->close();
  }
  Py_RETURN_NONE;
}

// -> [(number of calls, the latest as uint32 [N, 3]: rtt, compute, queue in
// microseconds)], one for each duck
PyObject* client_statistics(Arguments& args) {
  auto* client = args.held<ClientRef>("client");
  if (!args.done()) return nullptr;
  auto logs = (*client)->logs();
  return make_list(logs.size(), [&](size_t i) {
    const auto& latest = logs[i].latest();
    return Py_BuildValue("(KN)", static_cast<unsigned long long>(logs[i].num_calls()),
                         to_bytes(latest.data(), latest.size() * sizeof(CallTimes)));
  });
}

PyObject* ticket_is_done(Arguments& args) {
  auto* held = args.held<HeldTicket>("ticket");
  if (!args.done()) return nullptr;
  bool is_done;
  {
    WithoutGil released;
    is_done = held->client->is_done(held->ticket.get());
  }
  return PyBool_FromLong(is_done);
}

// -> None, with the sum in out (float32 [T, H]; None: not wanted), or what failed:
// (duck index, kind, code, text), see ticket.h; or news of a duck in the same form, and
// the wait has not ended
PyObject* ticket_wait(Arguments& args) {
  auto* held = args.held<HeldTicket>("ticket");
  PyObject* array = args.object("out");
  if (!args.done()) return nullptr;
  auto& ticket = *held->ticket;
  BytesView out;
  bool is_wanted = array != Py_None;
  if (is_wanted &&
      (!out.get(array, PyBUF_WRITABLE) ||
       !out.require_size("out", size_t(ticket.num_rows) * ticket.hidden_size * 4)))
    return nullptr;
  News news;
  auto waited = Client::Waited::kNotYet;
  while (waited != Client::Waited::kSettled) {
    {
      WithoutGil released;
      waited = held->client->wait(&ticket, &news);
      if (is_wanted && waited == Client::Waited::kSettled && ticket.failed_duck < 0)
        sum_partials(ticket, out.data<float>());
    }
    if (waited == Client::Waited::kNews) return to_tuple(news.duck, news.what);
    // A lost duck is waited for long; a signal must not wait.
    if (waited == Client::Waited::kNotYet && PyErr_CheckSignals() != 0) return nullptr;
  }
  if (ticket.failed_duck < 0) Py_RETURN_NONE;
  return to_tuple(ticket.failed_duck, ticket.failure);
}

// After ticket_wait() has returned None -> (rtt_us, compute_us, link_us), of each the
// slowest duck's
PyObject* ticket_times(Arguments& args) {
  auto* held = args.held<HeldTicket>("ticket");
  if (!args.done()) return nullptr;
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

// After ticket_wait() has returned None -> [(partial, queue_us, compute_us, rtt_us)] in
// duck order
PyObject* ticket_replies(Arguments& args) {
  auto* held = args.held<HeldTicket>("ticket");
  if (!args.done()) return nullptr;
  const auto& slots = held->ticket->slots;
  return make_list(slots.size(), [&](size_t i) {
    const Slot& slot = slots[i];
    return Py_BuildValue("(NIII)",
                         to_bytes(slot.reply.partial.data, slot.reply.partial.size),
                         slot.reply.queue_us, slot.reply.compute_us, slot.rtt_us);
  });
}

}  // namespace

std::vector<PyMethodDef> client_functions() {
  return {
      method<client_new>("client_new"),
      method<client_start>("client_start"),
      method<client_begin_step>("client_begin_step"),
      method<client_close>("client_close"),
      method<client_statistics>("client_statistics"),
      method<ticket_is_done>("ticket_is_done"),
      method<ticket_wait>("ticket_wait"),
      method<ticket_times>("ticket_times"),
      method<ticket_replies>("ticket_replies"),
  };
}

}  // namespace duck::stream
