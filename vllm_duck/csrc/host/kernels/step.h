// The tokens of one step, or of one lane of it: where each is cached and what it sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace duck {
namespace host {

// Requests own runs of rows, one after the other: request q has rows row_begin[q] to
// row_begin[q + 1]; its first row sees positions 0 .. first_visible[q] - 1, each next
// row one more.
struct StepView {
  int num_rows;
  int num_requests;
  int block_size;
  const int32_t* row_begin;
  const int32_t* first_visible;
  const int64_t* slots;          // [num_rows] that a row's own keys go to; -1 = nowhere
  const int32_t* const* blocks;  // of each request: [its positions / block_size]

  int64_t slot(int request, int position) const {
    return int64_t(blocks[request][position / block_size]) * block_size +
           position % block_size;
  }
};

class Step {
 public:
  // table [num_requests][table_stride]; everything is copied.
  Step(int num_requests, int block_size, const int32_t* row_begin,
       const int32_t* first_visible, const int64_t* slots, const int32_t* table,
       size_t table_stride);

  StepView view() const;

 private:
  int block_size_;
  std::vector<int32_t> row_begin_;
  std::vector<int32_t> first_visible_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> table_;
  std::vector<const int32_t*> blocks_;
};

}  // namespace host
}  // namespace duck
