// What waits for the socket: frames, and the payloads that they carry by reference.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "stream/payload.h"

namespace duck::stream {

class SendQueue {
 public:
  // Whole frames, or the head of a DATA frame.
  void push(const uint8_t* frames, size_t size);
  // The head of a DATA frame, and its part of a payload.
  void push(const uint8_t* head, size_t size, PayloadRef payload, size_t begin,
            size_t end);

  bool is_empty() const { return chunks_.empty(); }
  // No more should be pushed for now; only the heads of frames take memory.
  bool is_full() const { return num_bytes_ >= kMaxBytes; }
  // Bytes of payloads that the socket has taken so far.
  size_t num_payload_bytes_written() const { return num_payload_bytes_written_; }

  // Gives the socket what it takes. Returns an errno when the connection is gone, else
  // 0; what the socket does not take stays.
  int write_to(int socket);

  // For who writes it elsewhere: what comes next, as far as it lies in one place, or
  // copied, as much as there is room for. Both stay until they are dropped as written.
  std::pair<const uint8_t*, size_t> next_part() const;
  size_t copy(uint8_t* to, size_t room) const;
  void drop(size_t num_bytes);

 private:
  static constexpr size_t kMaxBytes = 4 << 20;

  struct Chunk {
    std::string control;
    PayloadRef payload;
    size_t begin = 0, end = 0;
    size_t size() const { return control.size() + (end - begin); }
  };

  void add(Chunk chunk);

  std::deque<Chunk> chunks_;
  size_t first_written_ = 0;  // bytes of chunks_.front() that are out
  size_t num_bytes_ = 0;      // in chunks_
  size_t num_payload_bytes_written_ = 0;
};

}  // namespace duck::stream
