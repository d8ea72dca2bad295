// The codec of the native stream to Python, for calls over grpcio; codec.py is the only
// user.
#include <string>

#include "base/crc32c.h"
#include "duck/kernel_module.h"
#include "stream/proto.h"

namespace duck {
namespace {

using namespace duck::binding;
using namespace duck::stream;

char* new_bytes(size_t num_bytes, PyObject** out) {
  *out = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(num_bytes));
  return *out ? PyBytes_AsString(*out) : nullptr;
}

bool read_number(PyObject* arg, uint64_t* out) {
  PyObject* whole = PyNumber_Index(arg);
  if (!whole) return false;
  *out = PyLong_AsUnsignedLongLong(whole);
  Py_DECREF(whole);
  return !PyErr_Occurred();
}

// Fields of 32 bits.
bool read_numbers(PyObject* const* args, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) {
    uint64_t number;
    if (!read_number(args[i], &number)) return false;
    if (number >> 32) {
      PyErr_Format(shape_error, "a number of a message must be below 2^32, got %llu",
                   static_cast<unsigned long long>(number));
      return false;
    }
    out[i] = uint32_t(number);
  }
  return true;
}

// encode_request(request_id, layer_idx, num_rows, hidden_size, num_topk, reply_dtype,
//                hidden, topk_ids, topk_weights) -> message
PyObject* request_to_bytes(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  uint64_t request_id;
  uint32_t n[5];
  if (!require_args(num_args, 9) || !read_number(args[0], &request_id) ||
      !read_numbers(args + 1, 5, n))
    return nullptr;
  size_t topk_bytes = size_t(n[1]) * n[3] * 4;
  BytesView hidden, ids, weights;
  if (!hidden.get(args[6], size_t(n[1]) * n[2] * 2) || !ids.get(args[7], topk_bytes) ||
      !weights.get(args[8], topk_bytes))
    return nullptr;
  ForwardCall call = {n[0],
                      n[1],
                      n[2],
                      n[3],
                      static_cast<const uint16_t*>(hidden.data()),
                      static_cast<const int32_t*>(ids.data()),
                      static_cast<const float*>(weights.data()),
                      nullptr,
                      nullptr};
  RequestWriter writer(request_id, call, DType(n[4]));
  PyObject* message;
  auto* to = reinterpret_cast<uint8_t*>(new_bytes(writer.num_bytes(), &message));
  if (to) with_gil_if_short(writer.num_bytes(), [&] { writer.write(to); });
  return message;
}

// encode_reply(request_id, num_rows, hidden_size, dtype, queue_us, compute_us, partial)
// -> message
PyObject* reply_to_bytes(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  uint32_t n[5];
  RequestView request;
  if (!require_args(num_args, 7) || !read_number(args[0], &request.request_id) ||
      !read_numbers(args + 1, 5, n))
    return nullptr;
  request.num_rows = n[0];
  request.hidden_size = n[1];
  request.reply_dtype = n[2];
  ReplyFrame frame(request);
  BytesView partial;
  if (!partial.get(args[6], frame.partial_bytes())) return nullptr;
  PyObject* message;
  auto* to = reinterpret_cast<uint8_t*>(new_bytes(frame.num_bytes(), &message));
  if (!to) return nullptr;
  with_gil_if_short(frame.num_bytes(), [&] {
    frame.begin(to);
    if (partial.size())
      std::memcpy(to + frame.partial_at(), partial.data(), partial.size());
    frame.seal(to, n[3], n[4]);
  });
  return message;
}

// encode_refusal(request_id, status, error) -> message
PyObject* refusal_to_bytes(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  uint64_t request_id;
  uint32_t status;
  Py_ssize_t size;
  if (!require_args(num_args, 3) || !read_number(args[0], &request_id) ||
      !read_numbers(args + 1, 1, &status))
    return nullptr;
  const char* error = PyUnicode_AsUTF8AndSize(args[2], &size);
  if (!error) return nullptr;
  auto payload = encode_refusal(request_id, ForwardStatus(status),
                                std::string(error, size_t(size)));
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(payload->message()),
                                   Py_ssize_t(payload->message_bytes()));
}

template <class View>
Parsed parse_summed(const BytesView& message, View* view) {
  auto* data = static_cast<const uint8_t*>(message.data());
  size_t size = message.size();
  uint32_t checksum = 0;
  if (size > kChecksumBytes)
    with_gil_if_short(size, [&] { checksum = crc32c(data, size - kChecksumBytes, 0); });
  return parse({data, size}, checksum, view);
}

Py_ssize_t position(Slice tensor, const BytesView& message) {
  return tensor.data ? tensor.data - static_cast<const uint8_t*>(message.data()) : 0;
}

// parse_request(message) -> (request_id, layer_idx, num_rows, hidden_size, num_topk,
// reply_dtype, positions of hidden, topk_ids and topk_weights, misfit), or the number
// of a Parsed
PyObject* request_from_bytes(PyObject*, PyObject* object) {
  BytesView message;
  if (!message.get(object)) return nullptr;
  RequestView view;
  Parsed parsed = parse_summed(message, &view);
  if (parsed != Parsed::kOk) return PyLong_FromLong(long(parsed));
  std::string problem = misfit(view);
  return Py_BuildValue(
      "(KIIIIInnns#)", static_cast<unsigned long long>(view.request_id), view.layer_idx,
      view.num_rows, view.hidden_size, view.num_topk, view.reply_dtype,
      position(view.hidden, message), position(view.topk_ids, message),
      position(view.topk_weights, message), problem.data(), Py_ssize_t(problem.size()));
}

// parse_reply(message) -> (request_id, status, error, num_rows, hidden_size, dtype,
// queue_us, compute_us, position of partial, has_checksum, misfit), or the number of a
// Parsed; error is bytes
PyObject* reply_from_bytes(PyObject*, PyObject* object) {
  BytesView message;
  if (!message.get(object)) return nullptr;
  ReplyView view;
  Parsed parsed = parse_summed(message, &view);
  if (parsed != Parsed::kOk) return PyLong_FromLong(long(parsed));
  std::string problem = misfit(view);
  return Py_BuildValue(
      "(KIy#IIIIInis#)", static_cast<unsigned long long>(view.request_id), view.status,
      view.error.data ? reinterpret_cast<const char*>(view.error.data) : "",
      Py_ssize_t(view.error.size), view.num_rows, view.hidden_size, view.dtype,
      view.queue_us, view.compute_us, position(view.partial, message),
      int(view.has_checksum), problem.data(), Py_ssize_t(problem.size()));
}

}  // namespace

std::vector<PyMethodDef> codec_functions() {
  return {
      fast<request_to_bytes>("encode_request"),
      fast<reply_to_bytes>("encode_reply"),
      fast<refusal_to_bytes>("encode_refusal"),
      single<request_from_bytes>("parse_request"),
      single<reply_from_bytes>("parse_reply"),
  };
}

}  // namespace duck
