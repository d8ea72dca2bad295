// The kernel table's functions for an instruction set with fp32 vectors only.
// Include after the target pragma; S is a class of simd/.
#pragma once

#include "duck/kernels/few_rows.h"
#include "duck/kernels/many_rows.h"

namespace duck {
namespace {

template <class S>
struct VectorKernels {
  static size_t scratch_bytes(const LayerShape& shape, int max_rows) {
    size_t rows = padded_rows<S>(max_rows), stride = shape.act_stride();
    size_t gate_up =
        ManyScratch::bytes(rows * kScaleBlock, rows * kManyGroups * 2 * kGroup);
    size_t down = ManyScratch::bytes(rows * stride, rows * 2 * kGroup);
    return gate_up > down ? gate_up : down;
  }

  static void gate_up(const ExpertRows& rows, int begin, int end,
                      const HiddenRows& hidden, uint8_t* scratch) {
    as_format(rows.expert.shape->format, [&](auto format) {
      gate_up_as<decltype(format)::value>(rows, begin, end, hidden, scratch);
    });
  }

  static void down(const ExpertRows& rows, int begin, int end, float* y,
                   size_t y_stride, uint8_t* scratch) {
    as_format(rows.expert.shape->format, [&](auto format) {
      down_as<decltype(format)::value>(rows, begin, end, y, y_stride, scratch);
    });
  }

  static float widen(Format format, const uint16_t* from, size_t num, float* to) {
    return as_format(format, [&](auto format) {
      return duck::widen<S, decltype(format)::value>(from, num, to);
    });
  }

 private:
  template <Format kFormat>
  using Constant = std::integral_constant<Format, kFormat>;

  // body(the experts' format as a constant).
  template <class Body>
  static auto as_format(Format format, const Body& body) {
    switch (format) {
      case Format::kE4m3:
        return body(Constant<Format::kE4m3>());
      case Format::kBf16:
        return body(Constant<Format::kBf16>());
      case Format::kInt8:
        return body(Constant<Format::kInt8>());
      default:
        return body(Constant<Format::kInt4>());
    }
  }

  template <Format kFormat>
  static void gate_up_as(const ExpertRows& rows, int begin, int end,
                         const HiddenRows& hidden, uint8_t* scratch) {
    if (rows.num_rows > kMaxFewRows)
      gate_up_many<S, kFormat>(rows, begin, end, hidden, scratch);
    else
      gate_up_few_all<S, kFormat>(rows, begin, end, hidden);
  }

  template <Format kFormat>
  static void down_as(const ExpertRows& rows, int begin, int end, float* y,
                      size_t y_stride, uint8_t* scratch) {
    if (rows.num_rows > kMaxFewRows)
      down_many<S, kFormat>(rows, begin, end, y, y_stride, scratch);
    else
      down_few_all<S, kFormat>(rows, begin, end, y, y_stride,
                               reinterpret_cast<float*>(scratch));
  }
};

template <class S>
KernelTable vector_kernel_table(const char* name) {
  using Kernels = VectorKernels<S>;
  return {name,
          kMaxFewRows,
          Kernels::widen,
          Kernels::scratch_bytes,
          Kernels::gate_up,
          Kernels::down,
          nullptr};
}

}  // namespace
}  // namespace duck
