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

class Layer {
 public:
  explicit Layer(const LayerShape& shape);

  const LayerShape& shape() const { return shape_; }
  size_t weight_bytes() const { return shape_.expert_bytes() * shape_.num_experts; }
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
  std::shared_ptr<uint8_t> weights_;
  std::vector<uint8_t> marks_;
  std::vector<float> scales_;
  std::unique_ptr<std::atomic<bool>[]> loaded_;
  std::atomic<int> num_loaded_{0};
};

}  // namespace duck
