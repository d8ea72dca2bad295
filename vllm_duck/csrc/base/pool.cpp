#include "base/pool.h"

#include <chrono>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace duck {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to bridge the two phases of a call and back-to-back lanes, short enough
// that an idle duck costs nothing.
constexpr auto kSpin = std::chrono::microseconds(40);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or the time is up; returns ready().
template <class Ready>
bool spin_until(const Ready& ready) {
  auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (Clock::now() < deadline);
  return ready();
}

void pin_to(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)cpu;
#endif
}

}  // namespace

Pool::Pool(int num_threads, const std::vector<int>& cpus) {
  try {
    for (int worker = 1; worker < num_threads; ++worker) {
      int cpu = worker < int(cpus.size()) ? cpus[worker] : -1;
      threads_.emplace_back([this, worker, cpu] {
        if (cpu >= 0) pin_to(cpu);
        serve(worker);
      });
    }
  } catch (...) {
    // The system gives no more threads: those that run must not outlive the pool.
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run_raw(int num_workers, const void* context, Call call) {
  if (num_workers <= 1) return call(context, 0);
  call_ = call;
  context_ = context;
  num_workers_ = num_workers;
  // Every thread reports back, also one with no part in this job: then none can
  // read the job's fields while the next one is written.
  unfinished_.store(int(threads_.size()));
  epoch_.fetch_add(1);
  if (num_asleep_.load() > 0) {
    // The lock orders this against a thread that is about to wait.
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  run_share(0);
  // Also after an exception: the other shares use the caller's stack.
  auto done = [this] { return unfinished_.load() == 0; };
  while (!spin_until(done)) std::this_thread::yield();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::run_share(int worker) {
  try {
    call_(context_, worker);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void Pool::serve(int worker) {
  FlushDenormals flush;
  unsigned seen = 0;
  while (wait_for_job(seen)) {
    seen = epoch_.load();
    if (worker < num_workers_) run_share(worker);
    unfinished_.fetch_sub(1);
  }
}

// Returns false when the pool stops.
bool Pool::wait_for_job(unsigned seen) {
  auto ready = [&] { return epoch_.load() != seen || stop_.load(); };
  if (!spin_until(ready)) {
    std::unique_lock<std::mutex> lock(mutex_);
    num_asleep_.fetch_add(1);
    wake_.wait(lock, ready);
    num_asleep_.fetch_sub(1);
  }
  return !stop_.load();
}

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
namespace {
constexpr unsigned long kFlushBit = 1ul << 24;
unsigned long read_fpcr() {
  unsigned long value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void write_fpcr(unsigned long value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
}  // namespace
FlushDenormals::FlushDenormals() : saved_(unsigned(read_fpcr())) {
  write_fpcr(saved_ | kFlushBit);
}
FlushDenormals::~FlushDenormals() { write_fpcr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() {}
#endif

}  // namespace duck
