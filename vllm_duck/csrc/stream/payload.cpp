#include "stream/payload.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32c.h"

namespace duck::stream {
namespace {

constexpr size_t kAlignment = 64;
// What is copied and summed in turns, so that it is summed from the L1 cache.
constexpr size_t kBlock = 16 << 10;

}  // namespace

Payload::Payload(size_t message_bytes, size_t aligned_at)
    : block_(message_bytes + kPrefixBytes + kAlignment - 1),
      size_(message_bytes + kPrefixBytes) {
  size_t at = size_t(block_.data()) + kPrefixBytes + aligned_at;
  data_ = block_.data() + (kAlignment - at % kAlignment) % kAlignment;
  data_[0] = 0;
  for (int i = 0; i < 4; ++i) data_[1 + i] = uint8_t(message_bytes >> (24 - 8 * i));
}

PayloadRef make_payload(const void* message, size_t message_bytes) {
  auto payload = std::make_shared<Payload>(message_bytes);
  if (message_bytes) std::memcpy(payload->message(), message, message_bytes);
  return payload;
}

Message::Message(Message&& other) noexcept
    : checksum(other.checksum),
      block_(std::move(other.block_)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)) {}

Message& Message::operator=(Message&& other) noexcept {
  std::swap(checksum, other.checksum);
  std::swap(block_, other.block_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  return *this;
}

void Message::append(const uint8_t* data, size_t num_bytes) {
  if (num_bytes == 0) return;  // there may be no memory yet
  if (data != end()) std::memcpy(end(), data, num_bytes);
  size_ += num_bytes;
}

Assembler::Result Assembler::feed(const uint8_t** at, const uint8_t* end,
                                  size_t max_message_bytes) {
  if (num_prefix_ < kPrefixBytes) {
    while (num_prefix_ < kPrefixBytes && *at < end) prefix_[num_prefix_++] = *(*at)++;
    if (num_prefix_ < kPrefixBytes) return Result::kMore;
    announced_ =
        size_t(prefix_[1]) << 24 | prefix_[2] << 16 | prefix_[3] << 8 | prefix_[4];
    if (prefix_[0] != 0) return Result::kCompressed;
    if (announced_ > max_message_bytes) return Result::kTooLarge;
    // Addresses only: the system gives memory to the pages that are written.
    message_ = Message(std::max<size_t>(1, announced_));
  }
  size_t part = std::min(announced_ - message_.size(), size_t(end - *at));
  append(*at, part);
  *at += part;
  return message_.size() == announced_ ? Result::kMessage : Result::kMore;
}

void Assembler::append(const uint8_t* data, size_t num_bytes) {
  size_t num_covered = announced_ - std::min(announced_, kChecksumBytes);
  while (num_bytes > 0) {
    size_t part = std::min(num_bytes, kBlock);
    message_.append(data, part);
    data += part;
    num_bytes -= part;
    size_t until = std::min(message_.size(), num_covered);
    checksum_ = crc32c(message_.data() + num_summed_, until - num_summed_, checksum_);
    num_summed_ = until;
  }
}

Message Assembler::take() {
  num_prefix_ = 0;
  num_summed_ = 0;
  message_.checksum = std::exchange(checksum_, 0);
  return std::exchange(message_, Message());
}

}  // namespace duck::stream
