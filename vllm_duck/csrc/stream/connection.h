// One HTTP/2 connection that carries gRPC messages: what client and server share.
//
// Nothing here blocks. The owner calls receive() when the socket is readable, flush()
// when it is writable or something was sent, and drops the connection when either
// returns false.
#pragma once

#include <nghttp2/nghttp2.h>

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stream/payload.h"
#include "stream/send_queue.h"
#include "stream/status.h"
#include "stream/tls.h"

namespace duck::stream {

// More headers than that are no call of ours.
constexpr size_t kMaxHeaderBytes = 16 << 10;

struct Stream {
  int32_t id = 0;
  Headers headers;   // the first block
  Headers trailers;  // the second one
  size_t header_bytes = 0;
  bool is_oversized = false;  // a request's headers, which then are not all here
  bool has_headers = false;
  bool has_response = false;
  // The peer has ended its side.
  bool is_half_closed = false;
  Assembler inbox;
  // Nothing more is read from it.
  bool is_ignored = false;
  // Its window stays shut: credit for what arrives is kept back until reopen().
  bool is_held = false;
  size_t held_bytes = 0;
  std::deque<PayloadRef> outbox;
  size_t num_sent = 0;  // bytes of outbox.front()
  bool is_deferred = false;
  bool is_ending = false;
  Status ending;
};

class Connection {
 public:
  enum class Refusal { kCompressed, kTooLarge, kNoMemory };

  // Called from within receive() and flush(); none of them may destroy the connection.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void on_headers(Stream* stream, bool is_last) = 0;
    virtual size_t max_message_bytes(const Stream& stream) = 0;
    virtual void on_message(Stream* stream, Message message) = 0;
    // A message will not be read; the stream is ignored from here on.
    virtual void on_refusal(Stream* stream, Refusal why) = 0;
    virtual void on_half_close(Stream* stream) = 0;
    virtual void on_close(Stream* stream, uint32_t h2_error) = 0;
    virtual void on_goaway() = 0;
  };

  // Takes the socket over; it must be non-blocking. Without `tls` bytes are plain.
  Connection(int socket, bool is_server, uint32_t max_streams, Owner* owner,
             std::unique_ptr<Tls> tls);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int socket() const { return socket_; }
  bool receive();
  bool flush();
  // Something could not be written yet.
  bool is_clogged() const {
    return !queue_.is_empty() || (tls_ && tls_->num_unsent() > 0);
  }
  // Why receive() or flush() returned false.
  const std::string& end_reason() const { return end_reason_; }
  // flush() returned false because all is said on both sides, and written.
  bool is_finished() const { return is_finished_; }
  // The socket is the caller's to close; the connection is of no further use.
  int release_socket() { return std::exchange(socket_, -1); }
  // Of payloads, until the socket has taken them.
  size_t unsent_bytes() const {
    return num_payload_bytes_ - queue_.num_payload_bytes_written();
  }
  uint64_t num_received() const { return num_received_; }

  // Client: opens a stream that sends messages until it is closed. 0 if it cannot.
  int32_t open_stream(const Headers& headers);
  // Server: answers with gRPC's headers and `more`, then messages.
  void respond(Stream* stream, const Headers& more);
  // Server: the end of a call, after what was sent before. Without respond() it is the
  // whole answer.
  void finish(Stream* stream, const Status& status);

  void send(Stream* stream, PayloadRef payload);
  void reopen(Stream* stream);
  void ping();
  void announce_end();
  Stream* find(int32_t id);

 private:
  static int on_begin_frame(nghttp2_session*, const nghttp2_frame_hd*, void*);
  static int on_begin_headers(nghttp2_session*, const nghttp2_frame*, void*);
  static int on_header(nghttp2_session*, const nghttp2_frame*, const uint8_t*, size_t,
                       const uint8_t*, size_t, uint8_t, void*);
  static int on_frame(nghttp2_session*, const nghttp2_frame*, void*);
  static int on_data(nghttp2_session*, uint8_t, int32_t, const uint8_t*, size_t, void*);
  static int on_frame_sent(nghttp2_session*, const nghttp2_frame*, void*);
  static int on_stream_close(nghttp2_session*, int32_t, uint32_t, void*);
  static int send_data(nghttp2_session*, nghttp2_frame*, const uint8_t*, size_t,
                       nghttp2_data_source*, void*);
  static ssize_t read_outbox(nghttp2_session*, int32_t, uint8_t*, size_t, uint32_t*,
                             nghttp2_data_source*, void*);
  static ssize_t frame_length(nghttp2_session*, uint8_t, int32_t, int32_t, int32_t,
                              uint32_t, void*);

  using Room = Assembler::Room;
  Room place();
  bool take(const uint8_t* bytes, size_t size);
  bool take_records(const uint8_t* records, size_t size);
  bool begin_tls();
  bool encrypt();
  bool fail_tls();
  bool fail_closed();
  void take_data(Stream* stream, const uint8_t* at, size_t num_bytes);
  void resume(Stream* stream);
  bool fail(std::string reason);
  bool pull_frames();

  int socket_;
  Owner* owner_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, std::unique_ptr<Stream>> streams_;
  std::unique_ptr<Tls> tls_;
  SendQueue queue_;
  size_t num_payload_bytes_ = 0;  // that were given to send(), and not dropped since
  uint64_t num_received_ = 0;
  bool has_spoken_ = false;  // the peer, in HTTP/2
  // Of the DATA frame that is under way, when it has no padding: its stream, the bytes
  // still to come, and where those that have come end.
  int32_t data_stream_ = 0;
  size_t data_left_ = 0;
  const uint8_t* data_end_ = nullptr;
  bool is_finished_ = false;
  std::string end_reason_;
};

}  // namespace duck::stream
