// What Pool promises when shares throw; run by test_pool.py.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "base/pool.h"

namespace {

constexpr int kWorkers = 4;

void check(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Runs a job in which the shares of `throwing` throw, and the others end later.
std::string run(duck::Pool* pool, bool (*throwing)(int)) {
  std::atomic<int> num_ended{0};
  std::string thrown;
  try {
    pool->run(kWorkers, [&](int worker) {
      if (throwing(worker)) {
        ++num_ended;
        throw std::runtime_error("share " + std::to_string(worker));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++num_ended;
    });
  } catch (const std::runtime_error& error) {
    thrown = error.what();
  }
  check(num_ended == kWorkers, "all shares end before run() does");
  return thrown;
}

void check_threads_that_cannot_start() {
  // A stack that large leaves no address space for a third thread.
  rlimit limit = {size_t(1) << 30, size_t(1) << 30};
  setrlimit(RLIMIT_AS, &limit);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, size_t(300) << 20);
  pthread_setattr_default_np(&attributes);
  bool has_thrown = false;
  try {
    duck::Pool pool(16, {});
  } catch (const std::exception&) {
    has_thrown = true;
  }
  check(has_thrown, "threads that cannot start are an exception");
}

}  // namespace

int main() {
  {
    duck::Pool pool(kWorkers, {});
    for (int round = 0; round < 3; ++round) {
      check(run(&pool, [](int w) { return w == 0; }) == "share 0", "the caller's");
      check(run(&pool, [](int w) { return w == 2; }) == "share 2", "a worker's");
      check(!run(&pool, [](int) { return true; }).empty(), "one of all");
      check(run(&pool, [](int) { return false; }).empty(), "none is left over");
    }
  }
  check_threads_that_cannot_start();
  std::puts("ok");
}
