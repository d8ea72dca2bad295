#include "stream/status.h"

#include <nghttp2/nghttp2.h>

namespace duck::stream {
namespace {

// gRPC's percent-encoding of grpc-message.
std::string percent_encoded(const std::string& text) {
  static const char* kDigits = "0123456789ABCDEF";
  std::string out;
  for (unsigned char c : text) {
    if (c >= 0x20 && c <= 0x7e && c != '%') {
      out += char(c);
    } else {
      out += '%';
      out += kDigits[c >> 4];
      out += kDigits[c & 15];
    }
  }
  return out;
}

int number(const std::string* text, int otherwise) {
  if (!text || text->empty() || text->size() > 4) return otherwise;
  int value = 0;
  for (char c : *text) {
    if (c < '0' || c > '9') return otherwise;
    value = 10 * value + (c - '0');
  }
  return value;
}

std::string percent_decoded(const std::string& text) {
  auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = char(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int high = -1, low = -1;
    if (text[i] == '%' && i + 2 < text.size()) {
      high = digit(text[i + 1]);
      low = digit(text[i + 2]);
    }
    if (high < 0 || low < 0) {
      out += text[i];
      continue;
    }
    out += char(high * 16 + low);
    i += 2;
  }
  return out;
}

// gRPC's table for answers that are not gRPC's.
int status_of_http(int http_status) {
  switch (http_status) {
    case 400:
      return kStatusInternal;
    case 401:
      return kStatusUnauthenticated;
    case 403:
      return kStatusPermissionDenied;
    case 404:
      return kStatusUnimplemented;
    case 429:
    case 502:
    case 503:
    case 504:
      return kStatusUnavailable;
    default:
      return kStatusUnknown;
  }
}

// gRPC's table for streams that are reset.
int status_of_reset(uint32_t h2_error) {
  switch (h2_error) {
    case NGHTTP2_REFUSED_STREAM:
      return kStatusUnavailable;
    case NGHTTP2_CANCEL:
      return kStatusCancelled;
    case NGHTTP2_ENHANCE_YOUR_CALM:
      return kStatusResourceExhausted;
    default:
      return kStatusInternal;
  }
}

}  // namespace

const std::string* find_header(const Headers& headers, const char* name) {
  for (const auto& [key, value] : headers)
    if (key == name) return &value;
  return nullptr;
}

Headers response_headers() {
  return {{":status", "200"}, {"content-type", "application/grpc"}};
}

Headers status_headers(const Status& status) {
  Headers headers = {{"grpc-status", std::to_string(status.code)}};
  if (!status.text.empty())
    headers.emplace_back("grpc-message", percent_encoded(status.text));
  return headers;
}

Status status_of(const Headers& headers, const Headers& trailers, uint32_t h2_error) {
  const std::string* http = find_header(headers, ":status");
  if (http && *http != "200")
    return {status_of_http(number(http, 0)), "HTTP status " + *http};
  const Headers& last = find_header(trailers, "grpc-status") ? trailers : headers;
  const std::string* code = find_header(last, "grpc-status");
  if (!code)
    return {status_of_reset(h2_error),
            std::string("the stream was reset: ") + nghttp2_http2_strerror(h2_error)};
  const std::string* text = find_header(last, "grpc-message");
  return {number(code, kStatusUnknown), text ? percent_decoded(*text) : ""};
}

}  // namespace duck::stream
