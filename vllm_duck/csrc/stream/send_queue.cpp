#include "stream/send_queue.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <utility>

namespace duck::stream {
namespace {

constexpr int kMaxIovecs = 64;

std::string text_of(const uint8_t* data, size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

}  // namespace

void SendQueue::push(const uint8_t* frames, size_t size) {
  add({text_of(frames, size), nullptr, 0, 0});
}

void SendQueue::push(const uint8_t* head, size_t size, PayloadRef payload, size_t begin,
                     size_t end) {
  add({text_of(head, size), std::move(payload), begin, end});
}

void SendQueue::add(Chunk chunk) {
  num_bytes_ += chunk.size();
  chunks_.push_back(std::move(chunk));
}

int SendQueue::write_to(int socket) {
  while (!chunks_.empty()) {
    iovec parts[kMaxIovecs];
    int num_parts = 0;
    size_t skip = first_written_, total = 0;
    auto add_part = [&](const void* data, size_t size) {
      size_t skipped = std::min(skip, size);
      skip -= skipped;
      if (size == skipped) return;
      parts[num_parts++] = {const_cast<char*>(static_cast<const char*>(data)) + skipped,
                            size - skipped};
      total += size - skipped;
    };
    for (const Chunk& chunk : chunks_) {
      if (num_parts + 2 > kMaxIovecs) break;
      add_part(chunk.control.data(), chunk.control.size());
      if (chunk.payload)
        add_part(chunk.payload->data() + chunk.begin, chunk.end - chunk.begin);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = size_t(num_parts);
    ssize_t written = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
    }
    drop(size_t(written));
    if (size_t(written) < total) return 0;
  }
  return 0;
}

std::pair<const uint8_t*, size_t> SendQueue::next_part() const {
  const Chunk& front = chunks_.front();
  size_t num_control = front.control.size();
  if (first_written_ < num_control || !front.payload)
    return {reinterpret_cast<const uint8_t*>(front.control.data()) + first_written_,
            num_control - first_written_};
  size_t begin = front.begin + first_written_ - num_control;
  return {front.payload->data() + begin, front.end - begin};
}

size_t SendQueue::copy(uint8_t* to, size_t room) const {
  size_t skip = first_written_, total = 0;
  auto copy_part = [&](const void* data, size_t size) {
    size_t skipped = std::min(skip, size);
    skip -= skipped;
    size_t copied = std::min(size - skipped, room - total);
    memcpy(to + total, static_cast<const uint8_t*>(data) + skipped, copied);
    total += copied;
  };
  for (const Chunk& chunk : chunks_) {
    if (total == room) break;
    copy_part(chunk.control.data(), chunk.control.size());
    if (chunk.payload)
      copy_part(chunk.payload->data() + chunk.begin, chunk.end - chunk.begin);
  }
  return total;
}

void SendQueue::drop(size_t num_bytes) {
  first_written_ += num_bytes;
  while (!chunks_.empty() && first_written_ >= chunks_.front().size()) {
    const Chunk& front = chunks_.front();
    first_written_ -= front.size();
    num_bytes_ -= front.size();
    num_payload_bytes_written_ += front.end - front.begin;
    chunks_.pop_front();
  }
}

}  // namespace duck::stream
