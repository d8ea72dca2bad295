// Bytes between a connection's socket and nghttp2, plain or through TLS.
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>

#include "stream/connection.h"

namespace duck::stream {
namespace {

constexpr size_t kReceiveBytes = 256 << 10;
// So much of a message is received into its place; a copy of less costs nothing.
constexpr size_t kWorthPlacing = 64 << 10;
// The most that TLS has in one record, and what is encrypted before it is sent.
constexpr size_t kRecordBytes = 16 << 10;
constexpr size_t kEncryptBytes = 256 << 10;
// Then the owner looks after its other connections.
constexpr int kReceivesInARow = 16;

uint8_t* receive_buffer() {
  static thread_local std::unique_ptr<uint8_t[]> buffer(new uint8_t[kReceiveBytes]);
  return buffer.get();
}

uint8_t* record_buffer() {
  static thread_local std::unique_ptr<uint8_t[]> buffer(new uint8_t[kReceiveBytes]);
  return buffer.get();
}

}  // namespace

bool Connection::fail(std::string reason) {
  if (end_reason_.empty()) end_reason_ = std::move(reason);
  return false;
}

bool Connection::receive() try {
  for (int i = 0; i < kReceivesInARow; ++i) {
    auto [buffer, room] = tls_ ? Room{record_buffer(), kReceiveBytes} : place();
    ssize_t size = ::recv(socket_, buffer, room, 0);
    if (size == 0) return fail_closed();
    if (size < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) break;
      return fail(strerror(errno));
    }
    num_received_ += uint64_t(size);
    if (!(tls_ ? take_records(buffer, size_t(size)) : take(buffer, size_t(size))))
      return false;
    if (size_t(size) < room) break;
  }
  return flush();
} catch (const std::bad_alloc&) {
  return fail("no memory");
}

bool Connection::take(const uint8_t* bytes, size_t size) {
  has_spoken_ = true;
  data_end_ = nullptr;
  ssize_t taken = nghttp2_session_mem_recv(session_, bytes, size);
  if (taken == NGHTTP2_ERR_CALLBACK_FAILURE) throw std::bad_alloc();
  if (taken < 0) {
    flush();  // says why to the peer, if it can
    return fail(std::string("not HTTP/2 as it must be: ") +
                nghttp2_strerror(int(taken)));
  }
  // Without this, bytes that nghttp2 did not hand on would count as still to come.
  if (data_end_ != bytes + size) data_left_ = 0;
  return true;
}

// Takes all of them: what is left within OpenSSL would make no socket ready.
bool Connection::take_records(const uint8_t* records, size_t size) {
  tls_->feed(records, size);
  if (!tls_->is_open() && !tls_->shake_hands()) return fail_tls();
  while (tls_->is_open()) {
    auto [buffer, room] = place();
    ssize_t num_plain = tls_->read(buffer, room);
    if (num_plain < 0) return fail_tls();
    if (num_plain == 0) break;
    if (!take(buffer, size_t(num_plain))) return false;
  }
  return true;
}

// Some ends of TLS give no reason; where they end the connection tells it.
bool Connection::fail_closed() {
  std::string reason = "the peer closed the connection";
  if (has_spoken_) return fail(reason);
  reason += " without a word; ";
  if (!tls_) return fail(reason + "if it has --tls-cert, set tls_ca");
  if (!tls_->is_open())
    return fail(reason +
                "start the duck with --tls-cert and --tls-key, or leave out "
                "tls_ca");
  return fail(reason +
              "if it asks for a certificate, set tls_cert and tls_key to one "
              "of its --tls-ca");
}

bool Connection::fail_tls() {
  tls_->send_to(socket_);  // an alert, if the peer still listens
  return fail(tls_->problem());
}

// Where the next bytes are received. A frame's rest goes into its message at once,
// never past the end of either: memory that the bytes may free when they are taken.
Assembler::Room Connection::place() {
  Stream* stream = data_left_ >= kWorthPlacing ? find(data_stream_) : nullptr;
  if (stream && !stream->is_ignored) {
    auto [data, size] = stream->inbox.room();
    size = std::min({size, data_left_, kReceiveBytes});
    if (size >= kWorthPlacing) return {data, size};
  }
  return {receive_buffer(), kReceiveBytes};
}

bool Connection::flush() try {
  if (tls_ && !tls_->is_open()) return begin_tls();
  for (;;) {
    if (!pull_frames()) return false;
    if (!is_clogged()) break;
    if (tls_ && !encrypt()) return fail_tls();
    if (int error = tls_ ? tls_->send_to(socket_) : queue_.write_to(socket_))
      return fail(strerror(error));
    if (tls_ ? tls_->num_unsent() > 0 : !queue_.is_empty()) return true;
  }
  if (nghttp2_session_want_read(session_) || nghttp2_session_want_write(session_))
    return true;
  is_finished_ = true;
  return fail("the connection is finished");
} catch (const std::bad_alloc&) {
  return fail("no memory");
}

// Says what is this side's to say in the handshake.
bool Connection::begin_tls() {
  if (!tls_->shake_hands()) return fail_tls();
  if (int error = tls_->send_to(socket_)) return fail(strerror(error));
  return true;
}

// Moves what waits into records: some of it, so that it is sent while it is in a cache.
bool Connection::encrypt() {
  uint8_t record[kRecordBytes];
  while (!queue_.is_empty() && tls_->num_unsent() < kEncryptBytes) {
    auto [data, size] = queue_.next_part();
    size = std::min(size, kEncryptBytes) / kRecordBytes * kRecordBytes;
    // Heads of frames and the ends of payloads share a record.
    if (size == 0) {
      data = record;
      size = queue_.copy(record, sizeof record);
    }
    if (!tls_->write(data, size)) return false;
    queue_.drop(size);
  }
  return true;
}

// Moves frames from nghttp2 to the queue, as long as there is room.
bool Connection::pull_frames() {
  while (!queue_.is_full()) {
    const uint8_t* data;
    ssize_t size = nghttp2_session_mem_send(session_, &data);
    if (size == NGHTTP2_ERR_CALLBACK_FAILURE) throw std::bad_alloc();
    if (size < 0) return fail(nghttp2_strerror(int(size)));
    if (size == 0) return true;
    queue_.push(data, size_t(size));
  }
  return true;
}

}  // namespace duck::stream
