#include "stream/proto.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace duck::stream {
namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

constexpr uint32_t kChecksumField = 10;

// Times of a reply: two tags, two varints that always take five bytes, so that the
// message's length is known before the kernel runs.
constexpr size_t kTimesBytes = 2 * (1 + 5);

constexpr uint8_t tag(uint32_t field, WireType type) {
  return uint8_t(field << 3 | type);
}

class Reader {
 public:
  Reader(const uint8_t* data, size_t num_bytes)
      : begin_(data), at_(data), end_(data + num_bytes) {}

  bool at_end() const { return at_ == end_; }
  size_t position() const { return size_t(at_ - begin_); }

  bool varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 70 && at_ < end_; shift += 7) {
      uint8_t byte = *at_++;
      *value |= uint64_t(byte & 127) << shift;
      if (byte < 128) return true;
    }
    return false;
  }

  bool bytes(Slice* slice) {
    uint64_t size;
    if (!varint(&size) || size > uint64_t(end_ - at_)) return false;
    *slice = {at_, size_t(size)};
    at_ += size;
    return true;
  }

  bool fixed32(uint32_t* value) {
    if (end_ - at_ < 4) return false;
    *value = at_[0] | at_[1] << 8 | at_[2] << 16 | uint32_t(at_[3]) << 24;
    at_ += 4;
    return true;
  }

  // A field that is not ours. Groups are not used and count as malformed.
  bool skip(uint32_t wire_type) {
    uint64_t ignored_number;
    Slice ignored;
    switch (wire_type) {
      case kVarint:
        return varint(&ignored_number);
      case kBytes:
        return bytes(&ignored);
      case kFixed64:
      case kFixed32: {
        ptrdiff_t size = wire_type == kFixed64 ? 8 : 4;
        if (end_ - at_ < size) return false;
        at_ += size;
        return true;
      }
      default:
        return false;
    }
  }

 private:
  const uint8_t* begin_;
  const uint8_t* at_;
  const uint8_t* end_;
};

// Where a number or the bytes of a field go; null for a field that is not ours.
struct Targets {
  uint64_t* wide = nullptr;
  uint32_t* narrow = nullptr;
  Slice* slice = nullptr;
};

Targets targets(RequestView* request, uint32_t field) {
  switch (field) {
    case 1:
      return {&request->request_id, nullptr, nullptr};
    case 2:
      return {nullptr, &request->layer_idx, nullptr};
    case 3:
      return {nullptr, &request->num_rows, nullptr};
    case 4:
      return {nullptr, &request->hidden_size, nullptr};
    case 5:
      return {nullptr, &request->num_topk, nullptr};
    case 6:
      return {nullptr, &request->reply_dtype, nullptr};
    case 7:
      return {nullptr, nullptr, &request->hidden};
    case 8:
      return {nullptr, nullptr, &request->topk_ids};
    case 9:
      return {nullptr, nullptr, &request->topk_weights};
    default:
      return {};
  }
}

Targets targets(ReplyView* reply, uint32_t field) {
  switch (field) {
    case 1:
      return {&reply->request_id, nullptr, nullptr};
    case 2:
      return {nullptr, &reply->status, nullptr};
    case 3:
      return {nullptr, nullptr, &reply->error};
    case 4:
      return {nullptr, &reply->num_rows, nullptr};
    case 5:
      return {nullptr, &reply->hidden_size, nullptr};
    case 6:
      return {nullptr, &reply->dtype, nullptr};
    case 7:
      return {nullptr, &reply->queue_us, nullptr};
    case 8:
      return {nullptr, &reply->compute_us, nullptr};
    case 9:
      return {nullptr, nullptr, &reply->partial};
    default:
      return {};
  }
}

template <class View>
bool read_field(Reader* reader, uint32_t field, uint32_t wire_type, View* view) {
  Targets to = targets(view, field);
  if (wire_type == kBytes && to.slice) return reader->bytes(to.slice);
  if (wire_type != kVarint || !(to.wide || to.narrow)) return reader->skip(wire_type);
  uint64_t value;
  if (!reader->varint(&value)) return false;
  if (to.wide) *to.wide = value;
  if (to.narrow) *to.narrow = uint32_t(value);
  return true;
}

template <class View>
Parsed parse_as(Slice message, uint32_t checksum, View* view) {
  Reader reader(message.data, message.size);
  size_t num_covered = 0;
  uint32_t expected = 0;
  while (!reader.at_end()) {
    // Nothing may follow the checksum: it would not be covered.
    if (view->has_checksum) return Parsed::kMalformed;
    num_covered = reader.position();
    uint64_t key;
    if (!reader.varint(&key) || key >> 32 || key >> 3 == 0) return Parsed::kMalformed;
    uint32_t field = uint32_t(key >> 3), wire_type = key & 7;
    view->has_checksum = field == kChecksumField && wire_type == kFixed32;
    bool good = view->has_checksum ? reader.fixed32(&expected)
                                   : read_field(&reader, field, wire_type, view);
    if (!good) return Parsed::kMalformed;
  }
  // It covers the bytes before it, and its tag has but one byte.
  if (view->has_checksum &&
      (num_covered + kChecksumBytes != message.size || checksum != expected))
    return Parsed::kBadChecksum;
  return Parsed::kOk;
}

class Writer {
 public:
  // `num_before` bytes of the message are in front already.
  explicit Writer(uint8_t* at, size_t num_before = 0)
      : at_(at), summed_(at - num_before) {}
  uint8_t* at() const { return at_; }

  // Zero is the default of every number and is left out, as protobuf does.
  void number(uint32_t field, uint64_t value) {
    if (value == 0) return;
    *at_++ = tag(field, kVarint);
    varint(value);
  }
  void five_byte_number(uint32_t field, uint32_t value) {
    *at_++ = tag(field, kVarint);
    for (int i = 0; i < 4; ++i, value >>= 7) *at_++ = uint8_t(value | 128);
    *at_++ = uint8_t(value);
  }
  // Varints may end in a zero byte that they do not need.
  void lengthen_last() {
    at_[-1] |= 128;
    *at_++ = 0;
  }
  void bytes_head(uint32_t field, size_t size) {
    *at_++ = tag(field, kBytes);
    varint(size);
  }
  // Each block is added to the checksum while it is in the cache.
  void bytes(uint32_t field, const void* data, size_t size) {
    bytes_head(field, size);
    auto* from = static_cast<const uint8_t*>(data);
    while (size > 0) {
      size_t part = std::min(size, kBlock);
      std::memcpy(at_, from, part);
      at_ += part;
      from += part;
      size -= part;
      sum();
    }
  }
  // Of all that was written.
  void checksum() {
    sum();
    *at_++ = tag(kChecksumField, kFixed32);
    for (int i = 0; i < 4; ++i) *at_++ = uint8_t(crc_ >> 8 * i);
  }

 private:
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) *at_++ = uint8_t(value | 128);
    *at_++ = uint8_t(value);
  }
  void sum() {
    crc_ = crc32c(summed_, size_t(at_ - summed_), crc_);
    summed_ = at_;
  }

  static constexpr size_t kBlock = 16 << 10;
  uint8_t* at_;
  uint8_t* summed_;
  uint32_t crc_ = 0;
};

bool is_known(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF32; }

std::string tensor_misfit(const char* name, Slice got, uint64_t rows, uint64_t columns,
                          uint64_t element) {
  // Two 32-bit sizes times four fit into 66 bits: compare without the product.
  bool fits = columns == 0 ? got.size == 0
                           : got.size % (columns * element) == 0 &&
                                 got.size / (columns * element) == rows;
  if (fits) return "";
  bool is_countable = rows * columns <= UINT64_MAX / element;
  return std::string(name) + " of shape [" + std::to_string(rows) + ", " +
         std::to_string(columns) + "] must have " +
         (is_countable ? std::to_string(rows * columns * element) : "2^64 or more") +
         " bytes, got " + std::to_string(got.size);
}

}  // namespace

Parsed parse(Slice message, uint32_t checksum, RequestView* request) {
  return parse_as(message, checksum, request);
}

Parsed parse(Slice message, uint32_t checksum, ReplyView* reply) {
  return parse_as(message, checksum, reply);
}

std::string misfit(const RequestView& request) {
  if (!is_known(request.dtype()))
    return "reply_dtype must be DTYPE_BF16 or DTYPE_F32, got " +
           std::to_string(request.reply_dtype);
  const struct {
    const char* name;
    Slice tensor;
    uint32_t columns;
    uint32_t element;
  } tensors[] = {{"hidden", request.hidden, request.hidden_size, 2},
                 {"topk_ids", request.topk_ids, request.num_topk, 4},
                 {"topk_weights", request.topk_weights, request.num_topk, 4}};
  for (const auto& each : tensors) {
    std::string problem = tensor_misfit(each.name, each.tensor, request.num_rows,
                                        each.columns, each.element);
    if (!problem.empty()) return problem;
  }
  return "";
}

std::string misfit(const ReplyView& reply) {
  if (!is_known(DType(reply.dtype)))
    return "dtype must be DTYPE_BF16 or DTYPE_F32, got " + std::to_string(reply.dtype);
  return tensor_misfit("partial", reply.partial, reply.num_rows, reply.hidden_size,
                       element_bytes(DType(reply.dtype)));
}

RequestWriter::RequestWriter(uint64_t request_id, const ForwardCall& call, DType dtype)
    : call_(call),
      hidden_bytes_(size_t(call.num_rows) * call.hidden_size * 2),
      topk_bytes_(size_t(call.num_rows) * call.num_topk * 4) {
  Writer head(head_);
  head.number(1, request_id);
  head.number(2, call.layer_idx);
  head.number(3, call.num_rows);
  head.number(4, call.hidden_size);
  head.number(5, call.num_topk);
  head.number(6, uint64_t(dtype));
  uint8_t scratch[kMaxHead];
  Writer tensor_heads(scratch);
  tensor_heads.bytes_head(7, hidden_bytes_);
  // Tensors at an even address spare the duck a copy.
  if ((head.at() - head_ + tensor_heads.at() - scratch) % 2) head.lengthen_last();
  tensor_heads.bytes_head(8, topk_bytes_);
  tensor_heads.bytes_head(9, topk_bytes_);
  head_bytes_ = size_t(head.at() - head_);
  num_bytes_ = head_bytes_ + size_t(tensor_heads.at() - scratch) + hidden_bytes_ +
               2 * topk_bytes_ + kChecksumBytes;
}

void RequestWriter::write(uint8_t* message) const {
  std::memcpy(message, head_, head_bytes_);
  Writer body(message + head_bytes_, head_bytes_);
  body.bytes(7, call_.hidden, hidden_bytes_);
  body.bytes(8, call_.topk_ids, topk_bytes_);
  body.bytes(9, call_.topk_weights, topk_bytes_);
  body.checksum();
}

PayloadRef encode_request(uint64_t request_id, const ForwardCall& call, DType dtype) {
  RequestWriter writer(request_id, call, dtype);
  auto payload = std::make_shared<Payload>(writer.num_bytes());
  writer.write(payload->message());
  return payload;
}

ReplyFrame::ReplyFrame(const RequestView& request)
    : partial_bytes_(size_t(request.num_rows) * request.hidden_size *
                     element_bytes(request.dtype())) {
  Writer head(head_);
  head.number(1, request.request_id);
  head.number(2, uint64_t(ForwardStatus::kOk));
  head.number(4, request.num_rows);
  head.number(5, request.hidden_size);
  head.number(6, request.reply_dtype);
  head.bytes_head(9, partial_bytes_);
  partial_at_ = size_t(head.at() - head_);
  num_bytes_ = partial_at_ + partial_bytes_ + kTimesBytes + kChecksumBytes;
}

void ReplyFrame::begin(uint8_t* message) const {
  std::memcpy(message, head_, partial_at_);
}

void ReplyFrame::seal(uint8_t* message, uint32_t queue_us, uint32_t compute_us) const {
  size_t num_before = partial_at_ + partial_bytes_;
  Writer tail(message + num_before, num_before);
  tail.five_byte_number(7, queue_us);
  tail.five_byte_number(8, compute_us);
  tail.checksum();
}

ReplyWriter::ReplyWriter(const RequestView& request)
    : frame_(request),
      payload_(std::make_shared<Payload>(frame_.num_bytes(), frame_.partial_at())) {
  frame_.begin(payload_->message());
}

PayloadRef ReplyWriter::seal(uint32_t queue_us, uint32_t compute_us) {
  frame_.seal(payload_->message(), queue_us, compute_us);
  return std::move(payload_);
}

PayloadRef encode_refusal(uint64_t request_id, ForwardStatus status,
                          const std::string& error) {
  uint8_t head[kMaxHead];
  Writer writer(head);
  writer.number(1, request_id);
  writer.number(2, uint64_t(status));
  writer.bytes_head(3, error.size());
  size_t head_bytes = size_t(writer.at() - head);
  auto payload = std::make_shared<Payload>(head_bytes + error.size() + kChecksumBytes);
  std::memcpy(payload->message(), head, head_bytes);
  std::memcpy(payload->message() + head_bytes, error.data(), error.size());
  size_t num_before = head_bytes + error.size();
  Writer tail(payload->message() + num_before, num_before);
  tail.checksum();
  return payload;
}

}  // namespace duck::stream
