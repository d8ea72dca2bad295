// Reads memory front to back with several threads, and does nothing else.
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" uint64_t read_memory(const uint64_t* words, size_t num_words,
                                int num_threads) {
  std::vector<uint64_t> sums(num_threads);
  auto read = [&](int thread) {
    size_t begin = num_words * thread / num_threads;
    size_t end = num_words * (thread + 1) / num_threads;
    uint64_t sum = 0;
    for (size_t i = begin; i < end; ++i) sum += words[i];
    sums[thread] = sum;
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < num_threads; ++thread)
    threads.emplace_back(read, thread);
  read(0);
  for (auto& thread : threads) thread.join();
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}
