#include "base/arena.h"

#include <new>

#include "base/huge_pages.h"

namespace duck {
namespace {

constexpr size_t kMinBlock = 2 << 20;
// What an arena keeps between calls: enough for a prompt chunk, so that decoding pays
// no page faults, and a long prompt's scratch goes back to the system.
constexpr size_t kMaxKept = size_t(64) << 20;

}  // namespace

void Arena::grow(size_t num_bytes) {
  size_t size = (num_bytes + kMinBlock - 1) / kMinBlock * kMinBlock;
  blocks_.push_back({take_huge(size), size});
}

size_t Arena::held_bytes() const {
  size_t total = 0;
  for (auto& block : blocks_) total += block.size;
  return total;
}

void* Arena::take(size_t num_bytes) {
  num_bytes = (num_bytes + 63) / 64 * 64;
  while (block_ < blocks_.size() && used_ + num_bytes > blocks_[block_].size) {
    if (used_ == 0) {
      // Empty, and so are those behind it: a larger one takes its place.
      blocks_.erase(blocks_.begin() + ptrdiff_t(block_));
      continue;
    }
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) grow(num_bytes);
  uint8_t* at = blocks_[block_].data.get() + used_;
  used_ += num_bytes;
  return at;
}

void Arena::release(Mark mark) {
  block_ = mark.block;
  used_ = mark.used;
}

void Arena::reset() {
  block_ = used_ = 0;
  if (blocks_.size() <= 1) return;
  size_t total = held_bytes();
  blocks_.clear();
  if (total > kMaxKept) return;
  try {
    grow(total);
  } catch (const std::bad_alloc&) {
    // The next call asks for what it needs.
  }
}

}  // namespace duck
