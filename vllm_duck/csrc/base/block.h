// The memory of a message or a sum. A large one is kept for the next block: malloc may
// give it back to the system, by what else lies on the heap, and pages that the system
// hands out anew cost more time than to fill them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace duck {

class Block {
 public:
  Block() = default;
  // Not zeroed, aligned as malloc does. Throws std::bad_alloc.
  explicit Block(size_t num_bytes);
  ~Block() {
    if (data_) give_back();
  }
  Block(Block&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Block& operator=(Block&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  uint8_t* data() const { return data_; }
  // What was asked for, or more.
  size_t size() const { return size_; }

  // Of a process and extension; then those that were kept for longest go.
  static constexpr size_t kMaxKept = size_t(256) << 20;
  // Smaller ones malloc keeps by itself.
  static constexpr size_t kSmallestKept = size_t(64) << 10;

 private:
  void give_back();

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace duck
