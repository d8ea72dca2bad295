#include "stream/connection.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "stream/nghttp2_calls.h"

namespace duck::stream {
namespace {

// Above 10 GbE times a millisecond; what a peer may have on the way to one stream. It
// opens again as messages are taken, so a message may be larger.
constexpr int32_t kWindowBytes = 16 << 20;
constexpr uint32_t kFrameBytes = 1 << 20;
// What HTTP/2 counts for each header on top of its name and value.
constexpr size_t kHeaderOverhead = 32;
constexpr size_t kFrameHeadBytes = 9;

}  // namespace

Connection::Connection(int socket, bool is_server, uint32_t max_streams, Owner* owner,
                       std::unique_ptr<Tls> tls)
    : socket_(socket), owner_(owner), tls_(std::move(tls)) {
  nghttp2_session_callbacks* callbacks = nullptr;
  nghttp2_option* option = nullptr;
  if (nghttp2_session_callbacks_new(&callbacks) != 0) throw std::bad_alloc();
  if (nghttp2_option_new(&option) != 0) {
    nghttp2_session_callbacks_del(callbacks);
    throw std::bad_alloc();
  }
  nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, on_begin_frame);
  nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks,
                                                          guarded<on_begin_headers>);
  nghttp2_session_callbacks_set_on_header_callback(callbacks, guarded<on_header>);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, guarded<on_frame>);
  nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, on_frame_sent);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks,
                                                            guarded<on_data>);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks,
                                                         guarded<on_stream_close>);
  nghttp2_session_callbacks_set_send_data_callback(callbacks, guarded<send_data>);
  nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks,
                                                                 frame_length);
  // Credit is given back by hand, so that a stream can be held.
  nghttp2_option_set_no_auto_window_update(option, 1);
  int result = is_server
                   ? nghttp2_session_server_new2(&session_, callbacks, this, option)
                   : nghttp2_session_client_new2(&session_, callbacks, this, option);
  nghttp2_session_callbacks_del(callbacks);
  nghttp2_option_del(option);
  if (result != 0) throw std::bad_alloc();
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, max_streams},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, uint32_t(kWindowBytes)},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, kFrameBytes},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, uint32_t(kMaxHeaderBytes)},
      {NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
  };
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings, is_server ? 4 : 5);
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kWindowBytes);
}

Connection::~Connection() {
  nghttp2_session_del(session_);
  if (socket_ >= 0) ::close(socket_);
}

int32_t Connection::open_stream(const Headers& headers) {
  auto pairs = to_nghttp2(headers);
  nghttp2_data_provider outbox{};
  outbox.read_callback = guarded<read_outbox>;
  int32_t id = nghttp2_submit_request(session_, nullptr, pairs.data(), pairs.size(),
                                      &outbox, nullptr);
  if (id <= 0) return 0;
  auto& stream = streams_[id];
  stream = std::make_unique<Stream>();
  stream->id = id;
  return id;
}

void Connection::respond(Stream* stream, const Headers& more) {
  stream->has_response = true;
  nghttp2_data_provider outbox{};
  outbox.read_callback = guarded<read_outbox>;
  Headers headers = response_headers();
  headers.insert(headers.end(), more.begin(), more.end());
  nghttp2_submit_response(session_, stream->id, to_nghttp2(headers).data(),
                          headers.size(), &outbox);
}

void Connection::finish(Stream* stream, const Status& status) {
  stream->is_ignored = true;
  reopen(stream);
  if (stream->is_ending) return;
  stream->is_ending = true;
  stream->ending = status;
  if (stream->has_response) return resume(stream);
  stream->has_response = true;
  Headers headers = response_headers();
  for (auto& pair : status_headers(status)) headers.push_back(std::move(pair));
  nghttp2_submit_response(session_, stream->id, to_nghttp2(headers).data(),
                          headers.size(), nullptr);
}

// A stream whose outbox ran empty has more to say.
void Connection::resume(Stream* stream) {
  if (!stream->is_deferred) return;
  stream->is_deferred = false;
  nghttp2_session_resume_data(session_, stream->id);
}

void Connection::send(Stream* stream, PayloadRef payload) {
  num_payload_bytes_ += payload->size();
  stream->outbox.push_back(std::move(payload));
  resume(stream);
}

void Connection::reopen(Stream* stream) {
  stream->is_held = false;
  if (stream->held_bytes == 0) return;
  nghttp2_session_consume_stream(session_, stream->id, stream->held_bytes);
  stream->held_bytes = 0;
}

void Connection::ping() { nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE, nullptr); }

void Connection::announce_end() {
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_),
                        NGHTTP2_NO_ERROR, nullptr, 0);
}

Stream* Connection::find(int32_t id) {
  auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second.get();
}

int Connection::on_begin_frame(nghttp2_session*, const nghttp2_frame_hd* head,
                               void* user) {
  auto* self = static_cast<Connection*>(user);
  bool is_plain = head->type == NGHTTP2_DATA && !(head->flags & NGHTTP2_FLAG_PADDED);
  self->data_stream_ = head->stream_id;
  self->data_left_ = is_plain ? head->length : 0;
  return 0;
}

int Connection::on_begin_headers(nghttp2_session*, const nghttp2_frame* frame,
                                 void* user) {
  auto* self = static_cast<Connection*>(user);
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  auto& stream = self->streams_[frame->hd.stream_id];
  stream = std::make_unique<Stream>();
  stream->id = frame->hd.stream_id;
  return 0;
}

int Connection::on_header(nghttp2_session*, const nghttp2_frame* frame,
                          const uint8_t* name, size_t name_size, const uint8_t* value,
                          size_t value_size, uint8_t, void* user) {
  Stream* stream = static_cast<Connection*>(user)->find(frame->hd.stream_id);
  if (!stream) return 0;
  stream->header_bytes += name_size + value_size + kHeaderOverhead;
  if (stream->header_bytes > kMaxHeaderBytes) {
    stream->is_oversized = frame->headers.cat == NGHTTP2_HCAT_REQUEST;
    // Of an answer: resets the stream.
    return stream->is_oversized ? 0 : NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  }
  Headers& headers = stream->has_headers ? stream->trailers : stream->headers;
  headers.emplace_back(std::string(reinterpret_cast<const char*>(name), name_size),
                       std::string(reinterpret_cast<const char*>(value), value_size));
  return 0;
}

int Connection::on_frame(nghttp2_session*, const nghttp2_frame* frame, void* user) {
  auto* self = static_cast<Connection*>(user);
  if (frame->hd.type == NGHTTP2_GOAWAY) self->owner_->on_goaway();
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
  Stream* stream = self->find(frame->hd.stream_id);
  if (!stream) return 0;
  bool is_last = frame->hd.flags & NGHTTP2_FLAG_END_STREAM;
  if (frame->hd.type == NGHTTP2_HEADERS && !stream->has_headers) {
    // 1xx answers are followed by the real ones.
    if (frame->headers.cat == NGHTTP2_HCAT_RESPONSE) {
      const std::string* status = find_header(stream->headers, ":status");
      if (status && status->size() == 3 && (*status)[0] == '1') {
        stream->headers.clear();
        return 0;
      }
    }
    stream->has_headers = true;
    self->owner_->on_headers(stream, is_last);
  }
  stream->is_half_closed = stream->is_half_closed || is_last;
  if (is_last && !stream->is_ignored) self->owner_->on_half_close(stream);
  return 0;
}

// The server has said its last word: the client need not send on.
int Connection::on_frame_sent(nghttp2_session* session, const nghttp2_frame* frame,
                              void* user) {
  if (frame->hd.type != NGHTTP2_HEADERS || !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM))
    return 0;
  Stream* stream = static_cast<Connection*>(user)->find(frame->hd.stream_id);
  if (stream && stream->is_ending && !stream->is_half_closed)
    nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream->id, NGHTTP2_NO_ERROR);
  return 0;
}

int Connection::on_data(nghttp2_session* session, uint8_t, int32_t id,
                        const uint8_t* data, size_t size, void* user) {
  auto* self = static_cast<Connection*>(user);
  self->data_left_ -= std::min(self->data_left_, size);
  self->data_end_ = data + size;
  nghttp2_session_consume_connection(session, size);
  Stream* stream = self->find(id);
  if (!stream) return 0;
  try {
    if (!stream->is_ignored) self->take_data(stream, data, size);
  } catch (const std::bad_alloc&) {
    stream->is_ignored = true;
    self->owner_->on_refusal(stream, Refusal::kNoMemory);
  }
  if (stream->is_held)
    stream->held_bytes += size;
  else
    nghttp2_session_consume_stream(session, id, size);
  return 0;
}

void Connection::take_data(Stream* stream, const uint8_t* at, size_t num_bytes) {
  const uint8_t* end = at + num_bytes;
  size_t max_bytes = owner_->max_message_bytes(*stream);
  while (!stream->is_ignored) {
    switch (stream->inbox.feed(&at, end, max_bytes)) {
      case Assembler::Result::kMore:
        return;
      case Assembler::Result::kMessage:
        owner_->on_message(stream, stream->inbox.take());
        if (at == end) return;
        break;
      case Assembler::Result::kCompressed:
        stream->is_ignored = true;
        return owner_->on_refusal(stream, Refusal::kCompressed);
      case Assembler::Result::kTooLarge:
        stream->is_ignored = true;
        return owner_->on_refusal(stream, Refusal::kTooLarge);
    }
  }
}

int Connection::on_stream_close(nghttp2_session*, int32_t id, uint32_t h2_error,
                                void* user) {
  auto* self = static_cast<Connection*>(user);
  auto found = self->streams_.find(id);
  if (found == self->streams_.end()) return 0;
  std::unique_ptr<Stream> stream = std::move(found->second);
  self->streams_.erase(found);
  size_t left = 0;
  for (const auto& payload : stream->outbox) left += payload->size();
  self->num_payload_bytes_ -= left - stream->num_sent;
  self->owner_->on_close(stream.get(), h2_error);
  return 0;
}

ssize_t Connection::frame_length(nghttp2_session*, uint8_t, int32_t,
                                 int32_t session_window, int32_t stream_window,
                                 uint32_t max_frame_bytes, void*) {
  return std::min(
      {session_window, stream_window, int32_t(std::min(max_frame_bytes, kFrameBytes))});
}

ssize_t Connection::read_outbox(nghttp2_session* session, int32_t id, uint8_t*,
                                size_t length, uint32_t* flags, nghttp2_data_source*,
                                void* user) {
  Stream* stream = static_cast<Connection*>(user)->find(id);
  if (!stream) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  if (!stream->outbox.empty()) {
    *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
    return ssize_t(std::min(length, stream->outbox.front()->size() - stream->num_sent));
  }
  if (!stream->is_ending) {
    stream->is_deferred = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
  Headers trailers = status_headers(stream->ending);
  nghttp2_submit_trailer(session, id, to_nghttp2(trailers).data(), trailers.size());
  return 0;
}

int Connection::send_data(nghttp2_session*, nghttp2_frame* frame, const uint8_t* head,
                          size_t length, nghttp2_data_source*, void* user) {
  auto* self = static_cast<Connection*>(user);
  if (self->queue_.is_full()) return NGHTTP2_ERR_WOULDBLOCK;
  Stream* stream = self->find(frame->hd.stream_id);
  if (!stream || stream->outbox.empty()) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  PayloadRef payload = stream->outbox.front();
  size_t begin = stream->num_sent, end = begin + length;
  stream->num_sent = end;
  if (end == payload->size()) {
    stream->outbox.pop_front();
    stream->num_sent = 0;
  }
  self->queue_.push(head, kFrameHeadBytes, std::move(payload), begin, end);
  return 0;
}

}  // namespace duck::stream
