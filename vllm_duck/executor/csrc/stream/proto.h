// ForwardRequest and ForwardReply of duck.proto as bytes, both ways.
//
// The checksum is the last field of a message and covers all bytes before it.
#pragma once

#include <string>

#include "compute.h"
#include "payload.h"

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

Parsed parse(const Message& message, RequestView* request);
Parsed parse(const Message& message, ReplyView* reply);

// Why the sizes and tensors of a request do not fit each other; empty if they do.
std::string misfit(const RequestView& request);

// What the caller has as arrays; sizes as in ForwardCall.
PayloadRef encode_request(uint64_t request_id, const ForwardCall& call, DType dtype);

// A reply whose partial sum is written later, then sealed.
class ReplyWriter {
 public:
  explicit ReplyWriter(const RequestView& request);
  // [num_rows][hidden_size], on a 64-byte boundary.
  uint8_t* partial() { return payload_->message() + partial_at_; }
  PayloadRef seal(uint32_t queue_us, uint32_t compute_us);

 private:
  size_t partial_at_;
  size_t partial_bytes_;
  PayloadRef payload_;
};

PayloadRef encode_refusal(const RequestView& request, ForwardStatus status,
                          const std::string& error);

}  // namespace duck::stream
