#include "host/kernels/step.h"

namespace duck {
namespace host {

Step::Step(int num_requests, int block_size, const int32_t* row_begin,
           const int32_t* first_visible, const int64_t* slots, const int32_t* table,
           size_t table_stride)
    : block_size_(block_size),
      row_begin_(row_begin, row_begin + num_requests + 1),
      first_visible_(first_visible, first_visible + num_requests),
      slots_(slots, slots + row_begin[num_requests]) {
  std::vector<size_t> offsets;
  for (int q = 0; q < num_requests; ++q) {
    int last_visible = first_visible[q] + row_begin[q + 1] - row_begin[q] - 1;
    size_t count = last_visible > 0 ? (last_visible + block_size - 1) / block_size : 0;
    offsets.push_back(table_.size());
    table_.insert(table_.end(), table + q * table_stride,
                  table + q * table_stride + count);
  }
  for (size_t offset : offsets) blocks_.push_back(table_.data() + offset);
}

StepView Step::view() const {
  return {row_begin_.back(), int(first_visible_.size()), block_size_,
          row_begin_.data(), first_visible_.data(),      slots_.data(),
          blocks_.data()};
}

}  // namespace host
}  // namespace duck
