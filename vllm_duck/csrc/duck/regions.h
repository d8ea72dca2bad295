// Shares units of work out to workers: each starts in a region of its own, always the
// same one, and then helps the others. Unit sizes do not matter for the result.
#pragma once

#include <atomic>
#include <memory>

namespace duck {

class Regions {
 public:
  // Items [0, num_items) are cut into num_regions runs; each run is repeated for each
  // of num_repeats (active experts) and handed out at most `max_chunk` items at a time.
  Regions(int num_items, int num_repeats, int num_regions, int max_chunk)
      : num_items_(num_items),
        num_repeats_(num_repeats),
        num_regions_(num_regions),
        max_chunk_(max_chunk),
        next_(new Counter[num_regions]) {}

  // Calls body(repeat, begin, end) until no unit is left, or until should_stop().
  template <class ShouldStop, class Body>
  void work(int worker, const ShouldStop& should_stop, const Body& body) {
    for (int i = 0; i < num_regions_; ++i) {
      int region = (worker + i) % num_regions_;
      int begin = edge(region), end = edge(region + 1);
      int chunks = num_chunks(region);
      for (;;) {
        if (should_stop()) return;
        int unit = next_[region].value.fetch_add(1, std::memory_order_relaxed);
        if (unit >= chunks * num_repeats_) break;
        int repeat = unit / chunks, chunk = unit % chunks;
        int from = begin + int(long(end - begin) * chunk / chunks);
        int to = begin + int(long(end - begin) * (chunk + 1) / chunks);
        body(repeat, from, to);
      }
    }
  }

  // Whether all units have been handed out, while nobody works.
  bool are_over() const {
    for (int region = 0; region < num_regions_; ++region)
      if (next_[region].value < num_chunks(region) * num_repeats_) return false;
    return true;
  }

  int edge(int region) const { return int(long(num_items_) * region / num_regions_); }

 private:
  int num_chunks(int region) const {
    return (edge(region + 1) - edge(region) + max_chunk_ - 1) / max_chunk_;
  }

  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  int num_items_, num_repeats_, num_regions_, max_chunk_;
  std::unique_ptr<Counter[]> next_;
};

}  // namespace duck
