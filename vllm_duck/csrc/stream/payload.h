// The memory of messages: what is sent, shared between connections, and what arrives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/block.h"

namespace duck::stream {

// In front of each message on the wire: a zero byte ("not compressed") and the length,
// four bytes, big endian.
constexpr size_t kPrefixBytes = 5;

// At the end of each message of Forward: the tag of its checksum, and four bytes.
constexpr size_t kChecksumBytes = 5;

// One outgoing message with its prefix. It is sent by reference, so it lives until the
// last connection has written its last byte.
class Payload {
 public:
  // `aligned_at` is the offset of the message that lies on a 64-byte boundary.
  explicit Payload(size_t message_bytes, size_t aligned_at = 0);
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;

  uint8_t* message() { return data_ + kPrefixBytes; }
  size_t message_bytes() const { return size_ - kPrefixBytes; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Block block_;
  uint8_t* data_;
  size_t size_;
};

using PayloadRef = std::shared_ptr<Payload>;

PayloadRef make_payload(const void* message, size_t message_bytes);

// One incoming message. Not std::vector, which writes zeros first.
class Message {
 public:
  Message() = default;
  // Room for so many bytes, of which none is there yet. Throws std::bad_alloc.
  explicit Message(size_t num_bytes) : block_(num_bytes), capacity_(num_bytes) {}
  Message(Message&& other) noexcept;
  Message& operator=(Message&& other) noexcept;

  uint8_t* data() { return block_.data(); }
  const uint8_t* data() const { return block_.data(); }
  size_t size() const { return size_; }
  // Where the next byte goes, and how many have room there.
  uint8_t* end() { return data() + size_; }
  size_t room() const { return capacity_ - size_; }

  // Needs room. What lies at end() already is not copied.
  void append(const uint8_t* data, size_t num_bytes);

  // CRC-32C of all but the last kChecksumBytes, if an Assembler made it.
  uint32_t checksum = 0;

 private:
  Block block_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Cuts the bytes of one stream into messages, and sums them as they come: they are in
// the cache, and the peer still sends. A length is judged before anything is reserved
// for it.
class Assembler {
 public:
  struct Room {
    uint8_t* data;
    size_t size;
  };
  enum class Result { kMore, kMessage, kCompressed, kTooLarge };

  // Takes from [*at, end) and moves *at on; at most one message. After kMessage, take()
  // it; after kCompressed or kTooLarge the stream is of no further use.
  Result feed(const uint8_t** at, const uint8_t* end, size_t max_message_bytes);

  Message take();
  bool is_between_messages() const { return num_prefix_ == 0; }
  size_t announced_bytes() const { return announced_; }
  // Of a message that has begun: memory is reserved for all of it.
  size_t unfinished_bytes() const {
    return num_prefix_ == kPrefixBytes ? announced_ : 0;
  }
  // Where the rest of the message that has begun may be put before it is fed; empty
  // between messages.
  Room room() { return {message_.end(), message_.room()}; }

 private:
  void append(const uint8_t* data, size_t num_bytes);

  uint8_t prefix_[kPrefixBytes];
  size_t num_prefix_ = 0;
  size_t announced_ = 0;
  size_t num_summed_ = 0;
  uint32_t checksum_ = 0;
  Message message_;
};

}  // namespace duck::stream
