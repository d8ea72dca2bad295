// ForwardRequest and ForwardReply of duck.proto as bytes, both ways.
//
// The checksum is the last field of a message and covers all bytes before it.
#pragma once

#include <string>

#include "base/compute.h"
#include "stream/payload.h"

namespace duck::stream {

enum class DType : uint32_t { kUnspecified = 0, kBf16 = 1, kF32 = 2 };

constexpr size_t element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// A field's bytes, inside the message that it was parsed from.
struct Slice {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

struct RequestView {
  uint64_t request_id = 0;
  uint32_t layer_idx = 0;
  uint32_t num_rows = 0;
  uint32_t hidden_size = 0;
  uint32_t num_topk = 0;
  uint32_t reply_dtype = 0;
  bool has_checksum = false;
  Slice hidden, topk_ids, topk_weights;

  DType dtype() const { return DType(reply_dtype); }
};

struct ReplyView {
  uint64_t request_id = 0;
  uint32_t status = 0;
  Slice error;
  uint32_t num_rows = 0;
  uint32_t hidden_size = 0;
  uint32_t dtype = 0;
  uint32_t queue_us = 0;
  uint32_t compute_us = 0;
  bool has_checksum = false;
  Slice partial;
};

enum class Parsed { kOk, kMalformed, kBadChecksum };

// `checksum` is that of all but the last kChecksumBytes of the message.
Parsed parse(Slice message, uint32_t checksum, RequestView* request);
Parsed parse(Slice message, uint32_t checksum, ReplyView* reply);

// Why sizes and tensors do not fit each other; empty if they do.
std::string misfit(const RequestView& request);
std::string misfit(const ReplyView& reply);

// No head of a message is longer: nine fields of a tag and a varint.
constexpr size_t kMaxHead = 9 * 11;

// A request in memory of the caller's choice. Sizes and arrays as in ForwardCall.
class RequestWriter {
 public:
  RequestWriter(uint64_t request_id, const ForwardCall& call, DType dtype);
  size_t num_bytes() const { return num_bytes_; }
  void write(uint8_t* message) const;

 private:
  ForwardCall call_;
  size_t hidden_bytes_, topk_bytes_;
  uint8_t head_[kMaxHead];
  size_t head_bytes_;
  size_t num_bytes_;
};

// What stands around the partial sum of a reply.
class ReplyFrame {
 public:
  explicit ReplyFrame(const RequestView& request);
  size_t num_bytes() const { return num_bytes_; }
  size_t partial_at() const { return partial_at_; }
  size_t partial_bytes() const { return partial_bytes_; }
  void begin(uint8_t* message) const;
  // When the partial sum is in its place.
  void seal(uint8_t* message, uint32_t queue_us, uint32_t compute_us) const;

 private:
  uint8_t head_[kMaxHead];
  size_t partial_at_;
  size_t partial_bytes_;
  size_t num_bytes_;
};

PayloadRef encode_request(uint64_t request_id, const ForwardCall& call, DType dtype);

// A reply whose partial sum is written later, then sealed.
class ReplyWriter {
 public:
  explicit ReplyWriter(const RequestView& request);
  // [num_rows][hidden_size], on a 64-byte boundary.
  uint8_t* partial() { return payload_->message() + frame_.partial_at(); }
  PayloadRef seal(uint32_t queue_us, uint32_t compute_us);

 private:
  ReplyFrame frame_;
  PayloadRef payload_;
};

PayloadRef encode_refusal(uint64_t request_id, ForwardStatus status,
                          const std::string& error);

}  // namespace duck::stream
