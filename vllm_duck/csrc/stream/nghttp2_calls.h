// How C++ meets nghttp2's C: headers as it takes them, callbacks that throw nothing.
#pragma once

#include <nghttp2/nghttp2.h>

#include <new>
#include <string>
#include <vector>

#include "stream/status.h"

namespace duck::stream {

inline nghttp2_nv header(const std::string& name, const std::string& value) {
  auto bytes = [](const std::string& text) {
    return reinterpret_cast<uint8_t*>(const_cast<char*>(text.data()));
  };
  return {bytes(name), bytes(value), name.size(), value.size(), NGHTTP2_NV_FLAG_NONE};
}

inline std::vector<nghttp2_nv> to_nghttp2(const Headers& headers) {
  std::vector<nghttp2_nv> out;
  for (const auto& [name, value] : headers) out.push_back(header(name, value));
  return out;
}

// A callback that may allocate: std::bad_alloc, the one exception there is, may not
// leave through nghttp2's C. It ends the connection.
template <auto callback, class Result, class... Args>
Result guarded(Args... args) {
  try {
    return callback(args...);
  } catch (const std::bad_alloc&) {
    return NGHTTP2_ERR_CALLBACK_FAILURE;
  }
}

}  // namespace duck::stream
