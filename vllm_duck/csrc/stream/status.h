// How gRPC spells the end of a call in HTTP/2 headers, in both directions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace duck::stream {

using Headers = std::vector<std::pair<std::string, std::string>>;

// What Forward's answer opens with: who the duck is, see identity.py.
constexpr const char* kIdentityHeader = "duck-identity";

// The value of a header, or null.
const std::string* find_header(const Headers& headers, const char* name);

// What gRPC calls the end of a call.
struct Status {
  int code = 0;
  std::string text;
};

// Of the gRPC status codes, those that are used here.
enum StatusCode {
  kStatusOk = 0,
  kStatusCancelled = 1,
  kStatusUnknown = 2,
  kStatusInvalidArgument = 3,
  kStatusPermissionDenied = 7,
  kStatusResourceExhausted = 8,
  kStatusUnimplemented = 12,
  kStatusInternal = 13,
  kStatusUnavailable = 14,
  kStatusDataLoss = 15,
  kStatusUnauthenticated = 16,
};

// What a server sends first, and last.
Headers response_headers();
Headers status_headers(const Status& status);

// What a client makes of a stream that has closed: its first and its last header block
// (the same one in an answer without messages), and the error of HTTP/2.
Status status_of(const Headers& headers, const Headers& trailers, uint32_t h2_error);

}  // namespace duck::stream
