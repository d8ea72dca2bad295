// Shares rows or a GEMM out to threads. No share changes a bit of the result.
// Include after the target pragma of the source that uses it.
#pragma once

#include "host/gemm/gemm.h"
#include "host/gemm/threads.h"

namespace duck {
namespace host {
namespace {

inline int num_workers(const Threads& threads, size_t work, int max_shares) {
  int count = min_int(threads.count(), max_shares);
  size_t wanted = 1 + work / threads.work_per_thread;
  return wanted < size_t(count) ? int(wanted) : max_int(count, 1);
}

// Share `worker` of [0, size), in multiples of `unit`.
inline Range share(int size, int unit, int worker, int count) {
  long units = (size + unit - 1) / unit;
  int begin = int(units * worker / count) * unit;
  int end = int(units * (worker + 1) / count) * unit;
  return {min_int(begin, size), min_int(end, size)};
}

// body(rows, arena) on each thread; `row_bytes` says what a row costs.
template <class Body>
void for_rows(const Threads& threads, int rows, size_t row_bytes, const Body& body) {
  int count = num_workers(threads, rows * row_bytes, rows);
  threads.pool->run(count, [&](int worker) {
    body(share(rows, 1, worker, count), &threads.workers[worker]);
  });
}

// body(item, arena) for each item, whoever is free.
template <class Body>
void for_items(const Threads& threads, int items, size_t item_bytes, const Body& body) {
  int count = num_workers(threads, items * item_bytes, items);
  int next = 0;
  threads.pool->run(count, [&](int worker) {
    for (;;) {
      int item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (item >= items) return;
      body(item, &threads.workers[worker]);
    }
  });
}

// Reading a weight counts its bytes, using it for a row a quarter of one.
inline size_t gemm_work(const Gemm& gemm) {
  size_t read = gemm.b.coded ? 1 : 2;
  return size_t(gemm.b.k) * gemm.b.n * (read + size_t(gemm.rows) / 4);
}

template <class G>
void run_gemm(const Threads& threads, const Gemm& gemm) {
  int groups = gemm.b.groups();
  int row_units = (gemm.rows + 31) / 32, group_units = (groups + 1) / 2;
  bool by_rows = row_units > group_units;
  int count = num_workers(threads, gemm_work(gemm), by_rows ? row_units : group_units);
  threads.pool->run(count, [&](int worker) {
    Range all_rows = {0, gemm.rows}, all_groups = {0, groups};
    if (by_rows)
      all_rows = share(gemm.rows, 32, worker, count);
    else
      all_groups = share(groups, 2, worker, count);
    G::run(gemm, all_rows, all_groups, &threads.workers[worker]);
  });
}

// One GEMM for each head, all of one size: make(head) gives it.
template <class G, class Make>
void run_heads(const Threads& threads, int heads, const Make& make) {
  Gemm first = make(0);
  size_t work = gemm_work(first);
  if (heads < threads.count()) {
    for (int head = 0; head < heads; ++head) run_gemm<G>(threads, make(head));
    return;
  }
  for_items(threads, heads, work, [&](int head, Arena* arena) {
    Gemm gemm = make(head);
    G::run(gemm, {0, gemm.rows}, {0, gemm.b.groups()}, arena);
  });
}

// A matrix of bf16 that can be the A of a GEMM.
struct Rows {
  uint16_t* data;
  size_t stride;

  uint16_t* row(int r) const { return data + r * stride; }
};

// Rows of `size` values each; the padding behind them is zero. An odd number of cache
// lines from row to row: a power of two would map a tile's rows to one cache set.
inline Rows take_rows(Arena* arena, int rows, int size) {
  size_t padded_size = round_up(size, kTileK);
  size_t stride = padded_size / kTileK % 2 ? padded_size : padded_size + kTileK;
  auto* data = static_cast<uint16_t*>(
      arena->take(sizeof(uint16_t) * stride * (rows + kSlackRows)));
  if (padded_size != size_t(size))
    for (int r = 0; r < rows; ++r)
      std::memset(data + r * stride + size, 0, sizeof(uint16_t) * (padded_size - size));
  return {data, stride};
}

// A copy of the caller's rows that a GEMM may read.
inline Rows copy_rows(Arena* arena, const uint16_t* x, int rows, int size) {
  Rows copy = take_rows(arena, rows, size);
  for (int r = 0; r < rows; ++r)
    std::memcpy(copy.row(r), x + size_t(r) * size, sizeof(uint16_t) * size);
  return copy;
}

inline float* take_floats(Arena* arena, size_t count) {
  return static_cast<float*>(arena->take(sizeof(float) * count));
}

}  // namespace
}  // namespace host
}  // namespace duck
