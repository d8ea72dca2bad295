#include "base/block.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace duck {
namespace {

struct Piece {
  uint8_t* data;
  size_t size;
};

// What was given back, the latest last.
class Kept {
 public:
  // The smallest that has room, and is not more than twice too large; or null.
  Piece take(size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = pieces_.end();
    for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
      bool fits = piece->size >= num_bytes && piece->size / 2 <= num_bytes;
      if (fits && (best == pieces_.end() || piece->size <= best->size)) best = piece;
    }
    if (best == pieces_.end()) return {nullptr, 0};
    Piece taken = *best;
    pieces_.erase(best);
    num_bytes_ -= taken.size;
    return taken;
  }

  void give(Piece piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    pieces_.push_back(piece);
    num_bytes_ += piece.size;
    shrink_to(Block::kMaxKept);
  }

  // True when there was something.
  bool drop_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    return shrink_to(0);
  }

 private:
  bool shrink_to(size_t max_bytes) {
    auto end = pieces_.begin();
    for (; num_bytes_ > max_bytes; ++end) {
      std::free(end->data);
      num_bytes_ -= end->size;
    }
    bool is_smaller = end != pieces_.begin();
    pieces_.erase(pieces_.begin(), end);
    return is_smaller;
  }

  std::mutex mutex_;
  std::vector<Piece> pieces_;
  size_t num_bytes_ = 0;
};

uint8_t* allocate(size_t num_bytes) {
  return static_cast<uint8_t*>(std::malloc(num_bytes));
}

// Never destroyed: blocks may outlive what has static storage.
Kept& kept() {
  static auto* kept = new Kept;
  return *kept;
}

}  // namespace

Block::Block(size_t num_bytes) {
  Piece piece{nullptr, std::max<size_t>(1, num_bytes)};
  if (num_bytes >= kSmallestKept) {
    Piece found = kept().take(num_bytes);
    if (found.data) piece = found;
  }
  if (!piece.data) piece.data = allocate(piece.size);
  if (!piece.data && kept().drop_all()) piece.data = allocate(piece.size);
  if (!piece.data) throw std::bad_alloc();
  data_ = piece.data;
  size_ = piece.size;
}

void Block::give_back() {
  if (size_ < kSmallestKept) return std::free(data_);
  try {
    kept().give({data_, size_});
  } catch (const std::bad_alloc&) {
    std::free(data_);
  }
}

}  // namespace duck
