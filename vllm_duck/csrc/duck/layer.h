// The memory of one layer's experts, and the packer that fills it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "duck/kernels/layout.h"

namespace duck {

// A matrix as the checkpoint has it: [columns][k], rows `row_bytes` apart; of int4, the
// lower half of a byte is the even k.
struct SourceMatrix {
  const uint8_t* data;
  ptrdiff_t row_bytes;
  // e4m3: fp32 [blocks of columns][blocks of k]; int8 and int4: bf16
  // [columns][segments]
  const void* scales;
};

enum class PackResult { kOk, kBadWeight, kBadScale };

// Zero pages from the kernel, with huge pages asked for: a 4 KiB page walk each
// 64 lines costs bandwidth.
class Mapping {
 public:
  explicit Mapping(size_t num_bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
};

class Layer {
 public:
  explicit Layer(const LayerShape& shape);

  const LayerShape& shape() const { return shape_; }
  size_t weight_bytes() const { return weights_.size(); }
  size_t resident_bytes() const;
  uint8_t* expert_data(int expert);
  ExpertView expert(int expert) const;

  // Packs gate, up and down of one expert. `bad_matrix` names the first matrix (0, 1,
  // 2) with a weight that is NaN or infinite, or a scale that is not finite or too
  // large for float once multiplied by kScaleFix. A bad expert stays unloaded.
  PackResult load(int expert, const SourceMatrix matrices[3], int* bad_matrix);

  // The first expert that was never loaded, or -1.
  int first_missing() const;

 private:
  PackResult pack(int expert, int matrix, const SourceMatrix& source);
  bool pack_block_scales(int expert, int matrix, const float* source);

  LayerShape shape_;
  Mapping weights_;
  std::vector<uint8_t> marks_;
  std::vector<float> scales_;
  std::unique_ptr<std::atomic<bool>[]> loaded_;
  std::atomic<int> num_loaded_{0};
};

}  // namespace duck
