// Scratch memory of one call: taken piece by piece, given back all at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace duck {

class Arena {
 public:
  // 64-byte aligned, not zeroed, valid until release() to an earlier mark.
  void* take(size_t num_bytes);

  struct Mark {
    size_t block, used;
  };
  Mark mark() const { return {block_, used_}; }
  void release(Mark mark);

  // Gives everything back; what did not fit in one block will next time.
  void reset();

 private:
  struct Block {
    std::shared_ptr<uint8_t> data;
    size_t size;
  };
  void grow(size_t num_bytes);
  size_t held_bytes() const;

  std::vector<Block> blocks_;
  size_t block_ = 0;  // the one in use
  size_t used_ = 0;   // bytes of it
};

}  // namespace duck
