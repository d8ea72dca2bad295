// Tokens, compared.
#pragma once

#include <string>

namespace duck::stream {

// Takes as long for every wrong value of the right length.
inline bool equal_secrets(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= (unsigned char)(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace duck::stream
