// Zeroed memory for weights, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {
namespace host {

class Mapping {
 public:
  explicit Mapping(size_t num_bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t size_;
};

}  // namespace host
}  // namespace duck
