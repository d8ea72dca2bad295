// Who computes on an engine: one call at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace duck {

// A call that gives way lets those that wait pass between two units of its work. Only
// one such call is under way: the others wait until it is over.
class Gate {
 public:
  void enter(bool gives_way);
  void leave(bool gives_way);
  bool is_wanted() const { return num_waiting_.load(std::memory_order_relaxed) > 0; }
  // For the call that gives way: returns when nobody waits any more.
  void let_pass();

 private:
  using Lock = std::unique_lock<std::mutex>;

  std::mutex giving_way_;
  std::mutex mutex_;
  std::condition_variable free_;
  bool is_taken_ = false;
  std::atomic<int> num_waiting_{0};
};

inline void Gate::enter(bool gives_way) {
  if (gives_way) giving_way_.lock();
  Lock lock(mutex_);
  if (!gives_way) ++num_waiting_;
  free_.wait(lock, [&] { return !is_taken_ && !(gives_way && is_wanted()); });
  if (!gives_way) --num_waiting_;
  is_taken_ = true;
}

inline void Gate::leave(bool gives_way) {
  {
    Lock lock(mutex_);
    is_taken_ = false;
  }
  free_.notify_all();
  if (gives_way) giving_way_.unlock();
}

inline void Gate::let_pass() {
  Lock lock(mutex_);
  is_taken_ = false;
  free_.notify_all();
  free_.wait(lock, [&] { return !is_taken_ && !is_wanted(); });
  is_taken_ = true;
}

}  // namespace duck
