// A few pinned threads that run one job together and sleep in between.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace duck {

class Pool {
 public:
  // The caller of run() is worker 0, so num_threads - 1 threads are started. Thread i
  // is pinned to cpus[i] if there is one; the caller is never pinned.
  Pool(int num_threads, const std::vector<int>& cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return int(threads_.size()) + 1; }

  // Calls job(worker) once on each of the first `num_workers` workers and returns when
  // all are done. Then throws the first exception that one of them threw, if any. One
  // caller at a time.
  template <class Job>
  void run(int num_workers, const Job& job) {
    run_raw(num_workers, &job, [](const void* ctx, int worker) {
      (*static_cast<const Job*>(ctx))(worker);
    });
  }

 private:
  using Call = void (*)(const void* context, int worker);

  void run_raw(int num_workers, const void* context, Call call);
  void run_share(int worker);
  void serve(int worker);
  bool wait_for_job(unsigned seen);
  void stop();

  Call call_ = nullptr;
  const void* context_ = nullptr;
  int num_workers_ = 0;
  std::exception_ptr error_;  // the first of this job; shares set it under mutex_
  std::atomic<unsigned> epoch_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

// Denormals count as zero, in and out, as in the AMX unit: that makes all instruction
// sets give the same bits, and spares the slow path of FMA units. Restores on exit.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace duck
