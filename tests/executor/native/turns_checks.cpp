// What Turns promises hosts that share a duck; run by test_turns.py.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "stream/server/turns.h"

namespace {

using duck::stream::Turns;

constexpr uint32_t kMaxShortRows = 64;

void check(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

using Sizes = std::map<uint64_t, uint32_t>;

void ask(Turns* turns, const Sizes& sizes) {
  for (auto [host, num_rows] : sizes) turns->ask(host, num_rows);
}

// Hosts that have asked and always ask again, each with requests of its own size;
// returns the rows of each after `num_requests`. A long request ends once nobody may
// pass it any more.
std::map<uint64_t, long> saturate(Turns* turns, Sizes sizes, int num_requests) {
  std::map<uint64_t, long> served;
  for (int i = 0; i < num_requests; ++i) {
    if (!turns->has_next()) turns->end_long();
    uint64_t host = turns->take();
    check(host != 0, "somebody is next when no long request is computed");
    turns->begin(host, sizes[host]);
    served[host] += sizes[host];
    turns->ask(host, sizes[host]);
  }
  return served;
}

void check_equal_rows() {
  for (const Sizes& sizes : std::vector<Sizes>{{{7, 2}, {8, 64}, {9, 2048}},
                                               {{7, 1}, {8, 2}, {9, 3}},
                                               {{7, 2048}, {8, 2048}, {9, 100}},
                                               {{7, 64}, {8, 64}, {9, 64}}}) {
    Turns turns(kMaxShortRows);
    ask(&turns, sizes);
    auto served = saturate(&turns, sizes, 20000);
    for (auto [host, rows] : served)
      for (auto [other, other_rows] : served)
        check(std::labs(rows - other_rows) <= 2 * 2048 + 64,
              "hosts that always ask have equal rows but for two requests");
  }
}

void check_that_silence_saves_nothing_up() {
  Turns turns(kMaxShortRows);
  ask(&turns, {{7, 64}});
  saturate(&turns, {{7, 64}}, 1000);
  ask(&turns, {{8, 64}});
  auto served = saturate(&turns, {{7, 64}, {8, 64}}, 100);
  check(served[8] >= 64 * 45 && served[8] <= 64 * 55,
        "who comes late gets half, not all that the other has had before");
}

void check_what_passes_a_long_request() {
  Turns turns(kMaxShortRows);
  turns.ask(7, 200);
  check(turns.take() == 7, "the only one is next");
  turns.begin(7, 200);
  turns.ask(7, 2);
  check(!turns.has_next(), "a host's own requests stay in order");
  turns.ask(8, 100);
  check(!turns.has_next(), "no long request passes another");
  turns.ask(9, 64);
  for (int passed = 0; passed <= 200; passed += 64) {
    check(turns.take() == 9, "short ones pass until their host has had as many rows");
    turns.begin(9, 64);
    turns.ask(9, 64);
  }
  check(!turns.has_next(), "and then wait for it");
  turns.end_long();
  check(turns.take() == 8, "whoever had least is next");
}

void check_hosts_that_leave() {
  Turns turns(kMaxShortRows);
  turns.ask(7, 200);
  turns.begin(turns.take(), 200);
  turns.forget(7);
  turns.ask(8, 2);
  turns.ask(9, 2);
  turns.forget(8);
  check(turns.take() == 9, "a host that has left has no turn");
  turns.begin(9, 2);
  check(turns.take() == 0 && !turns.has_next(), "nobody is left");
  turns.end_long();
}

}  // namespace

int main() {
  check_equal_rows();
  check_that_silence_saves_nothing_up();
  check_what_passes_a_long_request();
  check_hosts_that_leave();
  std::puts("ok");
}
