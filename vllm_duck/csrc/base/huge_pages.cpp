#include "base/huge_pages.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace duck {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSharedBytes = 8 * kHugePage;

size_t round_to(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Whole huge pages, aligned as such: the ends of a larger mapping are given back.
std::shared_ptr<uint8_t> map(size_t num_bytes) {
  size_t size = round_to(num_bytes, kHugePage), slack = size + kHugePage;
  void* at =
      mmap(nullptr, slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<uint8_t*>(at);
  size_t skip = round_to(size_t(begin), kHugePage) - size_t(begin);
  if (skip) munmap(begin, skip);
  if (skip != kHugePage) munmap(begin + skip + size, kHugePage - skip);
#ifdef MADV_HUGEPAGE
  madvise(begin + skip, size, MADV_HUGEPAGE);
#endif
  return {begin + skip, [size](uint8_t* data) { munmap(data, size); }};
}

}  // namespace

std::shared_ptr<uint8_t> take_huge(size_t num_bytes) {
  static std::mutex mutex;
  static std::shared_ptr<uint8_t> current;
  static size_t used = kSharedBytes;
  num_bytes = round_to(num_bytes, 64);
  if (num_bytes > kSharedBytes / 2) return map(num_bytes);
  std::lock_guard<std::mutex> lock(mutex);
  if (used + num_bytes > kSharedBytes) {
    current = map(kSharedBytes);
    used = 0;
  }
  uint8_t* at = current.get() + used;
  used += num_bytes;
  return {current, at};
}

}  // namespace duck
