// Run by test_memory.py: which blocks are kept. Every one is a mapping of its own here,
// so the system's count of mappings tells.
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <new>
#include <vector>

#include "base/block.h"

using duck::Block;

namespace {

constexpr size_t kMiB = 1 << 20;

void check(bool is_right, const char* what) {
  if (is_right) return;
  printf("not so: %s\n", what);
  exit(1);
}

size_t num_mappings() { return mallinfo2().hblks; }

void a_block_is_the_next_one_of_about_its_size() {
  uint8_t *small, *large;
  {
    Block a(kMiB), b(3 * kMiB);
    small = a.data();
    large = b.data();
  }
  size_t num_before = num_mappings();
  Block half(kMiB / 2), less(3 * kMiB - 1);
  check(half.data() == small && half.size() == kMiB, "half of a block takes all of it");
  check(less.data() == large, "the smallest that fits is taken");
  check(num_mappings() == num_before, "nothing was asked of the system");
  Block moved = std::move(half);
  check(moved.data() == small && !half.data(), "a block has one owner");
  { Block large_again(3 * kMiB); }
  Block tiny(kMiB);
  check(tiny.size() == kMiB, "no block of more than twice the size is taken");
}

void what_was_kept_for_longest_goes() {
  {
    std::vector<Block> blocks(8);
    for (auto& each : blocks) each = Block(64 * kMiB);
  }
  check(num_mappings() == Block::kMaxKept / (64 * kMiB), "at most kMaxKept is kept");
  { Block more_than_all(Block::kMaxKept + 1); }
  check(num_mappings() == 0, "and nothing that is larger by itself");
}

void small_ones_are_not_kept() {
  size_t num_before = num_mappings();
  { Block small(Block::kSmallestKept - 1); }
  check(num_mappings() == num_before, "small blocks go back at once");
}

void what_is_kept_goes_before_memory_is_said_to_be_out() {
  { Block kept(200 * kMiB); }
  check(num_mappings() == 1, "the block is kept");
  rlimit limit{300 * kMiB, RLIM_INFINITY};
  check(setrlimit(RLIMIT_AS, &limit) == 0, "the limit is set");
  { Block larger(220 * kMiB); }
  check(num_mappings() == 1, "the kept one has made room");
  bool is_refused = false;
  try {
    Block too_large(400 * kMiB);
  } catch (const std::bad_alloc&) {
    is_refused = true;
  }
  check(is_refused, "std::bad_alloc in the end");
}

}  // namespace

int main() {
  mallopt(M_MMAP_THRESHOLD, int(Block::kSmallestKept) / 2);
  a_block_is_the_next_one_of_about_its_size();
  what_was_kept_for_longest_goes();
  small_ones_are_not_kept();
  what_is_kept_goes_before_memory_is_said_to_be_out();
  puts("ok");
}
