// Whose request a duck computes next: hosts take turns by rows.
//
// Start-time fair queueing (Goyal, Vin and Cheng, 1996): a host's tag is the number of
// rows it has been served, or what the others had when it came back; the lowest tag is
// next. Hosts that always ask get equal rows, whatever the sizes of their requests, and
// one that was silent has saved nothing up.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

namespace duck::stream {

class Turns {
 public:
  // Requests of more rows are long: other hosts' short ones are computed meanwhile, up
  // to as many rows as the long one has.
  explicit Turns(uint32_t max_short_rows) : max_short_rows_(max_short_rows) {}

  bool is_long(uint32_t num_rows) const { return num_rows > max_short_rows_; }

  // The host's oldest request has num_rows rows. Once, until it is taken or dropped.
  void ask(uint64_t host, uint32_t num_rows);
  bool has_next() const { return find_next() != asking_.end(); }
  // Takes the host whose turn it is, or returns 0: nobody asks, or whoever does has to
  // wait for the long request.
  uint64_t take();
  // A request of the host that was taken is computed.
  void begin(uint64_t host, uint32_t num_rows);
  void end_long() { long_host_ = 0; }
  void forget(uint64_t host);

 private:
  struct Asking {
    uint64_t host;
    uint32_t num_rows;
  };
  using Place = std::deque<Asking>::const_iterator;

  Place find_next() const;
  bool may_begin(const Asking& asking) const;

  uint32_t max_short_rows_;
  std::deque<Asking> asking_;
  std::unordered_map<uint64_t, uint64_t> tags_;
  uint64_t now_ = 0;  // the tag with which the last request began
  uint64_t long_host_ = 0;
  uint64_t long_end_ = 0;  // its host's tag behind the long request
};

inline void Turns::ask(uint64_t host, uint32_t num_rows) {
  uint64_t& tag = tags_[host];
  if (tag < now_) tag = now_;
  asking_.push_back({host, num_rows});
}

// A host's own requests stay in order.
inline bool Turns::may_begin(const Asking& asking) const {
  if (!long_host_) return true;
  return asking.host != long_host_ && !is_long(asking.num_rows) &&
         tags_.at(asking.host) <= long_end_;
}

// Of equal tags, who asked first.
inline Turns::Place Turns::find_next() const {
  Place next = asking_.end();
  for (Place at = asking_.begin(); at != asking_.end(); ++at)
    if (may_begin(*at) &&
        (next == asking_.end() || tags_.at(at->host) < tags_.at(next->host)))
      next = at;
  return next;
}

inline uint64_t Turns::take() {
  Place next = find_next();
  if (next == asking_.end()) return 0;
  uint64_t host = next->host;
  asking_.erase(next);
  return host;
}

inline void Turns::begin(uint64_t host, uint32_t num_rows) {
  uint64_t& tag = tags_.at(host);
  // Beside a long request, it is still that one's turn.
  if (!long_host_) now_ = tag;
  tag += num_rows > 0 ? num_rows : 1;
  if (!is_long(num_rows)) return;
  long_host_ = host;
  long_end_ = tag;
}

inline void Turns::forget(uint64_t host) {
  tags_.erase(host);
  for (Place at = asking_.begin(); at != asking_.end(); ++at)
    if (at->host == host) {
      asking_.erase(at);
      return;
    }
}

}  // namespace duck::stream
