// Which strangers are late; run by test_strangers.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "stream/server/strangers.h"

namespace {

using duck::stream::Clock;
using duck::stream::Strangers;

void check(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

std::vector<uint64_t> late(Strangers* strangers, Clock::time_point now) {
  std::vector<uint64_t> found;
  strangers->each_late(now, [&](uint64_t id) { found.push_back(id); });
  return found;
}

}  // namespace

int main() {
  using std::chrono::milliseconds;
  using Ids = std::vector<uint64_t>;
  auto start = Clock::time_point{} + std::chrono::hours(1);
  auto patience = Strangers::kPatience;
  Strangers strangers;
  check(strangers.wait_ms() == -1, "nobody is looked for where nobody is");
  strangers.add(7, start);
  strangers.add(8, start + milliseconds(500));
  strangers.add(9, start + patience);
  check(late(&strangers, start + patience).empty(), "nobody is late yet");
  auto first = start + patience + Strangers::kLook;
  check(late(&strangers, first) == Ids({7, 8}), "two are");
  check(late(&strangers, first + milliseconds(900)).empty(), "one look a second");
  strangers.forget(8);
  check(late(&strangers, first + Strangers::kLook) == Ids({7}), "a host is never late");
  strangers.each_late(first + 2 * Strangers::kLook,
                      [&](uint64_t id) { strangers.forget(id); });
  check(strangers.oldest() == 9, "who is dropped meanwhile is gone");
  for (uint64_t id = 10; !strangers.is_full(); ++id) strangers.add(id, first);
  check(strangers.oldest() == 9, "the oldest goes first");
  std::puts("ok");
}
