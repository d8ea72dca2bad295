// Preloaded: makes large allocations fail in the threads that a test names.
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

}  // extern "C"

namespace {

// As in failing.py.
enum { kNowhere = 0, kMainThread = 1, kOtherThreads = 2 };

std::atomic<int> place{kNowhere};
std::atomic<size_t> least_bytes{0};
std::atomic<long> left_alone{0};
std::atomic<long> left_failing{0};
std::atomic<long> num_failed{0};

bool fails(size_t num_bytes) {
  if (place.load() == kNowhere || num_bytes < least_bytes.load()) return false;
  bool is_main = syscall(SYS_gettid) == getpid();
  if (is_main != (place.load() == kMainThread)) return false;
  if (left_alone.fetch_sub(1) > 0) return false;
  if (left_failing.fetch_sub(1) <= 0) return false;
  num_failed.fetch_add(1);
  errno = ENOMEM;
  return true;
}

}  // namespace

extern "C" {

// Of the allocations of at least `least` bytes, `count` fail after the first `skip`.
void memory_fails(int where, size_t least, long skip, long count) {
  place = kNowhere;
  least_bytes = least;
  left_alone = skip;
  left_failing = count;
  if (where != kNowhere) num_failed = 0;
  place = where;
}

long memory_failures() { return num_failed.load(); }

void* malloc(size_t size) { return fails(size) ? nullptr : __libc_malloc(size); }

void* realloc(void* at, size_t size) {
  return fails(size) ? nullptr : __libc_realloc(at, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  return fails(size) ? nullptr : __libc_memalign(alignment, size);
}

void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
  if ((flags & MAP_ANONYMOUS) && fails(size)) return MAP_FAILED;
  long result = syscall(SYS_mmap, at, size, protection, flags, fd, offset);
  return reinterpret_cast<void*>(result);
}

}  // extern "C"
