// The threads and the scratch memory of one call.
#pragma once

#include "base/arena.h"
#include "base/pool.h"

namespace duck {
namespace host {

struct Threads {
  Pool* pool;
  Arena* shared;   // the caller's
  Arena* workers;  // one for each thread of the pool
  // A thread is worth waking for this much work, in bytes of weights read.
  size_t work_per_thread;

  int count() const { return pool->num_threads(); }
};

}  // namespace host
}  // namespace duck
