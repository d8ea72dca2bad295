// The memory of messages: what is sent, shared between connections, and what arrives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace duck::stream {

// In front of each message on the wire: a zero byte ("not compressed") and the length,
// four bytes, big endian.
constexpr size_t kPrefixBytes = 5;

// One outgoing message with its prefix. It is sent by reference, so it lives until the
// last connection has written its last byte.
class Payload {
 public:
  // `aligned_at` is the offset of the message that lies on a 64-byte boundary.
  explicit Payload(size_t message_bytes, size_t aligned_at = 0);
  ~Payload();
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;

  uint8_t* message() { return data_ + kPrefixBytes; }
  size_t message_bytes() const { return size_ - kPrefixBytes; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* block_;
  uint8_t* data_;
  size_t size_;
};

using PayloadRef = std::shared_ptr<Payload>;

PayloadRef make_payload(const void* message, size_t message_bytes);

// One incoming message. Not std::vector, which writes zeros first.
class Message {
 public:
  Message() = default;
  ~Message();
  Message(Message&& other) noexcept;
  Message& operator=(Message&& other) noexcept;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // Throws std::bad_alloc.
  void reserve(size_t num_bytes);
  // Needs reserved room.
  void append(const uint8_t* data, size_t num_bytes);

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Cuts the bytes of one stream into messages. A length is judged before anything is
// reserved for it.
class Assembler {
 public:
  enum class Result { kMore, kMessage, kCompressed, kTooLarge };

  // Takes from [*at, end) and moves *at on; at most one message. After kMessage, take()
  // it; after kCompressed or kTooLarge the stream is of no further use.
  Result feed(const uint8_t** at, const uint8_t* end, size_t max_message_bytes);

  Message take();
  bool is_between_messages() const { return num_prefix_ == 0; }
  size_t announced_bytes() const { return announced_; }

 private:
  uint8_t prefix_[kPrefixBytes];
  size_t num_prefix_ = 0;
  size_t announced_ = 0;
  Message message_;
};

}  // namespace duck::stream
