// The codec of the native stream to Python, for calls over grpcio; codec.py is the only
// user. Of the stream, the duck uses these two by design: proto.h and its payload.h.
#include <cstring>

#include "base/call_arguments.h"
#include "base/crc32c.h"
#include "duck/kernel_module.h"
#include "stream/proto.h"

namespace duck {
namespace {

using namespace duck::binding;
using namespace duck::stream;

uint8_t* new_bytes(size_t num_bytes, PyObject** out) {
  *out = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(num_bytes));
  return *out ? reinterpret_cast<uint8_t*>(PyBytes_AsString(*out)) : nullptr;
}

// -> message
PyObject* request_to_bytes(Arguments& args) {
  uint64_t request_id = args.u64("request_id");
  auto reply_dtype = DType(args.u32("reply_dtype"));
  CallArguments request(args);
  if (!args.done()) return nullptr;
  RequestWriter writer(request_id, request.call, reply_dtype);
  PyObject* message;
  auto* to = new_bytes(writer.num_bytes(), &message);
  if (to) with_gil_if_short(writer.num_bytes(), [&] { writer.write(to); });
  return message;
}

// -> message
PyObject* reply_to_bytes(Arguments& args) {
  RequestView request;
  request.request_id = args.u64("request_id");
  request.num_rows = args.u32("num_rows");
  request.hidden_size = args.u32("hidden_size");
  request.reply_dtype = args.u32("dtype");
  uint32_t queue_us = args.u32("queue_us"), compute_us = args.u32("compute_us");
  ReplyFrame frame(request);
  BytesView partial;
  args.bytes("partial", &partial, frame.partial_bytes());
  if (!args.done()) return nullptr;
  PyObject* message;
  auto* to = new_bytes(frame.num_bytes(), &message);
  if (!to) return nullptr;
  with_gil_if_short(frame.num_bytes(), [&] {
    frame.begin(to);
    if (partial.size())
      std::memcpy(to + frame.partial_at(), partial.data<void>(), partial.size());
    frame.seal(to, queue_us, compute_us);
  });
  return message;
}

// -> message
PyObject* refusal_to_bytes(Arguments& args) {
  uint64_t request_id = args.u64("request_id");
  auto status = ForwardStatus(args.u32("status"));
  std::string error = args.text("error");
  if (!args.done()) return nullptr;
  auto payload = encode_refusal(request_id, status, error);
  return to_bytes(payload->message(), payload->message_bytes());
}

template <class View>
Parsed parse_summed(const BytesView& message, View* view) {
  auto* data = message.data<const uint8_t>();
  size_t size = message.size();
  uint32_t checksum = 0;
  if (size > kChecksumBytes)
    with_gil_if_short(size, [&] { checksum = crc32c(data, size - kChecksumBytes, 0); });
  return parse({data, size}, checksum, view);
}

Py_ssize_t position(Slice tensor, const BytesView& message) {
  return tensor.data ? tensor.data - message.data<const uint8_t>() : 0;
}

// -> what is in the message, with the positions of its tensors, or the number of a
// Parsed
PyObject* request_from_bytes(Arguments& args) {
  BytesView message;
  args.bytes("message", &message);
  if (!args.done()) return nullptr;
  RequestView view;
  Parsed parsed = parse_summed(message, &view);
  if (parsed != Parsed::kOk) return PyLong_FromLong(long(parsed));
  // clang-format off
  return Py_BuildValue("{sKsIsIsIsIsIsnsnsnsN}",
                       "request_id", static_cast<unsigned long long>(view.request_id),
                       "layer_idx", view.layer_idx,
                       "num_rows", view.num_rows,
                       "hidden_size", view.hidden_size,
                       "num_topk", view.num_topk,
                       "reply_dtype", view.reply_dtype,
                       "hidden_at", position(view.hidden, message),
                       "topk_ids_at", position(view.topk_ids, message),
                       "topk_weights_at", position(view.topk_weights, message),
                       "misfit", to_text(misfit(view)));
  // clang-format on
}

// -> what is in the message, with the position of the sum, or the number of a Parsed
PyObject* reply_from_bytes(Arguments& args) {
  BytesView message;
  args.bytes("message", &message);
  if (!args.done()) return nullptr;
  ReplyView view;
  Parsed parsed = parse_summed(message, &view);
  if (parsed != Parsed::kOk) return PyLong_FromLong(long(parsed));
  // clang-format off
  return Py_BuildValue("{sKsIsNsIsIsIsIsIsnsNsN}",
                       "request_id", static_cast<unsigned long long>(view.request_id),
                       "status", view.status,
                       "error", to_bytes(view.error.data, view.error.size),
                       "num_rows", view.num_rows,
                       "hidden_size", view.hidden_size,
                       "dtype", view.dtype,
                       "queue_us", view.queue_us,
                       "compute_us", view.compute_us,
                       "partial_at", position(view.partial, message),
                       "has_checksum", PyBool_FromLong(view.has_checksum),
                       "misfit", to_text(misfit(view)));
  // clang-format on
}

}  // namespace

std::vector<PyMethodDef> codec_functions() {
  return {
      method<request_to_bytes>("encode_request"),
      method<reply_to_bytes>("encode_reply"),
      method<refusal_to_bytes>("encode_refusal"),
      method<request_from_bytes>("parse_request"),
      method<reply_from_bytes>("parse_reply"),
  };
}

}  // namespace duck
