// What a duck holds, to Python: layers, and quantising for them. kernel.py is the only
// user and has checked plain numbers already; buffers are checked here.
#include "duck/kernel_module.h"
#include "duck/layer.h"
#include "duck/quantize.h"

namespace duck {
namespace {

using namespace duck::binding;

// layer_new(num_experts, hidden, columns, column_phase, format) -> layer
PyObject* layer_new(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int v[5];
  if (!require_args(num_args, 5) || !read_ints(args, 5, v)) return nullptr;
  LayerShape shape = {v[0], v[1], v[2], v[3], Format(v[4])};
  return PyCapsule_New(new Layer(shape), kLayerName, destroy<Layer>);
}

PyObject* layer_resident_bytes(PyObject*, PyObject* capsule) {
  auto* layer = from_capsule<Layer>(capsule, kLayerName);
  return layer ? PyLong_FromSize_t(layer->resident_bytes()) : nullptr;
}

PyObject* layer_first_missing(PyObject*, PyObject* capsule) {
  auto* layer = from_capsule<Layer>(capsule, kLayerName);
  return layer ? PyLong_FromLong(layer->first_missing()) : nullptr;
}

// layer_load(layer, expert, gate, up, down, gate_scale, up_scale, down_scale)
// -> None, or (matrix index, is_scale) of what is not finite.
PyObject* layer_load(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  static const char* const kNames[6] = {"gate",       "up",       "down",
                                        "gate_scale", "up_scale", "down_scale"};
  int expert;
  if (!require_args(num_args, 8) || !read_ints(args + 1, 1, &expert)) return nullptr;
  auto* layer = from_capsule<Layer>(args[0], kLayerName);
  if (!layer) return nullptr;
  const LayerShape& shape = layer->shape();
  Format format = shape.format;
  ArrayView weights[3], scales[3];
  SourceMatrix matrices[3];
  for (int m = 0; m < 3; ++m) {
    bool is_down = m == 2;
    Py_ssize_t rows = is_down ? shape.hidden : shape.columns;
    KAxis axis = is_down ? shape.down_axis() : shape.gate_up_axis();
    bool is_bf16 = format == Format::kBf16, is_int4 = format == Format::kInt4;
    if (!weights[m].get(args[2 + m], kNames[m], is_bf16 ? "H" : "B",
                        {rows, is_int4 ? axis.length / 2 : axis.length}))
      return nullptr;
    matrices[m] = {weights[m].data<uint8_t>(), weights[m].stride(0), nullptr};
    if (is_bf16) continue;
    bool is_grouped = duck::is_grouped(format);
    Py_ssize_t blocks = is_down ? shape.hidden_blocks() : shape.column_blocks();
    if (!scales[m].get(args[5 + m], kNames[3 + m], is_grouped ? "H" : "f",
                       {is_grouped ? rows : blocks, axis.num_segments()}) ||
        !scales[m].require_contiguous(kNames[3 + m]))
      return nullptr;
    matrices[m].scales = scales[m].data<void>();
  }
  PackResult result;
  int bad_matrix = 0;
  {
    WithoutGil released;
    result = layer->load(expert, matrices, &bad_matrix);
  }
  if (result == PackResult::kOk) Py_RETURN_NONE;
  return Py_BuildValue("(ii)", bad_matrix, int(result == PackResult::kBadScale));
}

// quantize(weight, scale or None, row_phase, k_position, format, codes, scales)
// -> whether all weights were finite. Weight and codes are [rows][k].
PyObject* quantize_matrix(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int v[3];
  if (!require_args(num_args, 7) || !read_ints(args + 2, 3, v)) return nullptr;
  ArrayView weight, scale, codes, scales;
  if (!weight.get(args[0], "weight", "BH", {-1, -1})) return nullptr;
  int rows = int(weight.size(0)), k = int(weight.size(1));
  bool is_bf16 = weight.code() == 'H';
  Format from = is_bf16 ? Format::kBf16 : Format::kE4m3, to = Format(v[2]);
  KAxis blocks(k, v[1], from), groups(k, v[1], to);
  Py_ssize_t row_blocks = ceil_div(v[0] + rows, kScaleBlock);
  if (!is_bf16 &&
      (!scale.get(args[1], "scale", "f", {row_blocks, blocks.num_segments()}) ||
       !scale.require_contiguous("scale")))
    return nullptr;
  if (!codes.get(args[5], "codes", "B", {rows, to == Format::kInt4 ? k / 2 : k},
                 true) ||
      !codes.require_contiguous("codes") ||
      !scales.get(args[6], "scales", "H", {rows, groups.num_segments()}, true) ||
      !scales.require_contiguous("scales"))
    return nullptr;
  QuantizeSource source = {from,
                           weight.data<uint8_t>(),
                           weight.stride(0),
                           is_bf16 ? nullptr : scale.data<float>(),
                           rows,
                           v[0],
                           k,
                           v[1]};
  bool good;
  {
    WithoutGil released;
    good = quantize(source, to, codes.data<uint8_t>(), scales.data<uint16_t>());
  }
  return PyBool_FromLong(good);
}

}  // namespace

std::vector<PyMethodDef> layer_functions() {
  return {
      fast<layer_new>("layer_new"),
      fast<layer_load>("layer_load"),
      single<layer_resident_bytes>("layer_resident_bytes"),
      single<layer_first_missing>("layer_first_missing"),
      fast<quantize_matrix>("quantize"),
  };
}

}  // namespace duck
