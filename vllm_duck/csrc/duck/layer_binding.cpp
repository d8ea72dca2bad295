// What a duck holds, to Python: layers, and quantising for them. Buffers are checked
// here, plain numbers by kernel.py and requantize.py, the only users.
#include "duck/kernel_module.h"
#include "duck/quantize.h"

namespace duck {
namespace {

using namespace duck::binding;

// -> layer
PyObject* layer_new(Arguments& args) {
  LayerShape shape;
  shape.num_experts = args.integer("num_experts");
  shape.hidden_size = args.integer("hidden_size");
  shape.columns = args.integer("num_columns");
  shape.column_offset = args.integer("column_offset");
  shape.format = Format(args.integer("format"));
  if (!args.done()) return nullptr;
  return to_capsule(std::make_unique<Layer>(shape));
}

PyObject* layer_resident_bytes(Arguments& args) {
  auto* layer = args.held<Layer>("layer");
  return args.done() ? PyLong_FromSize_t(layer->resident_bytes()) : nullptr;
}

// -> the index of an expert, or -1
PyObject* layer_first_missing(Arguments& args) {
  auto* layer = args.held<Layer>("layer");
  return args.done() ? PyLong_FromLong(layer->first_missing()) : nullptr;
}

// -> None, or (matrix index, is_scale) of what is not finite
PyObject* layer_load(Arguments& args) {
  static const char* const kNames[3] = {"gate", "up", "down"};
  static const char* const kScaleNames[3] = {"gate_scale", "up_scale", "down_scale"};
  auto* layer = args.held<Layer>("layer");
  int expert = args.integer("expert");
  if (!args.good()) return nullptr;
  const LayerShape& shape = layer->shape();
  bool is_bf16 = shape.format == Format::kBf16, is_int4 = shape.format == Format::kInt4;
  ArrayView weights[3], scales[3];
  SourceMatrix matrices[3];
  for (int m = 0; m < 3; ++m) {
    Py_ssize_t rows = m == 2 ? shape.hidden_size : shape.columns;
    int length = (m == 2 ? shape.down_axis() : shape.gate_up_axis()).length;
    if (!args.rows(kNames[m], &weights[m], is_bf16 ? "H" : "B",
                   {rows, is_int4 ? length / 2 : length}))
      return nullptr;
    matrices[m] = {weights[m].data<uint8_t>(), weights[m].stride(0), nullptr};
  }
  for (int m = 0; m < 3; ++m) {
    if (is_bf16) {
      args.object(kScaleNames[m]);
      continue;
    }
    bool is_grouped = duck::is_grouped(shape.format);
    Py_ssize_t rows = m == 2 ? shape.hidden_size : shape.columns;
    Py_ssize_t blocks = m == 2 ? shape.hidden_blocks() : shape.column_blocks();
    KAxis axis = m == 2 ? shape.down_axis() : shape.gate_up_axis();
    if (!args.array(kScaleNames[m], &scales[m], is_grouped ? "H" : "f",
                    {is_grouped ? rows : blocks, axis.num_segments()}))
      return nullptr;
    matrices[m].scales = scales[m].data<void>();
  }
  if (!args.done()) return nullptr;
  PackResult result;
  int bad_matrix = 0;
  {
    WithoutGil released;
    result = layer->load(expert, matrices, &bad_matrix);
  }
  if (result == PackResult::kOk) Py_RETURN_NONE;
  return Py_BuildValue("(ii)", bad_matrix, int(result == PackResult::kBadScale));
}

// -> whether all weights were finite. Weight and codes are [rows][k]; scale is None for
// weights in bf16.
PyObject* quantize_matrix(Arguments& args) {
  ArrayView weight, scale, codes, scales;
  if (!args.rows("weight", &weight, "BH", {-1, -1})) return nullptr;
  PyObject* scale_array = args.object("scale");
  QuantizeSource source = {};
  source.format = weight.code() == 'H' ? Format::kBf16 : Format::kE4m3;
  source.data = weight.data<uint8_t>();
  source.row_bytes = weight.stride(0);
  source.num_rows = int(weight.size(0));
  source.num_k = int(weight.size(1));
  source.row_offset = args.integer("row_offset");
  source.k_offset = args.integer("k_offset");
  auto format = Format(args.integer("format"));
  if (!args.good()) return nullptr;
  int rows = source.num_rows, k = source.num_k;
  KAxis blocks(k, source.k_offset, source.format), groups(k, source.k_offset, format);
  if (source.format == Format::kE4m3) {
    Py_ssize_t row_blocks = ceil_div(source.row_offset + rows, kScaleBlock);
    if (!scale.get(scale_array, "scale", "f", {row_blocks, blocks.num_segments()}, 0) ||
        !scale.require_contiguous("scale"))
      return nullptr;
    source.scales = scale.data<float>();
  }
  args.array("codes", &codes, "B", {rows, format == Format::kInt4 ? k / 2 : k},
             PyBUF_WRITABLE);
  args.array("scales", &scales, "H", {rows, groups.num_segments()}, PyBUF_WRITABLE);
  if (!args.done()) return nullptr;
  bool good;
  {
    WithoutGil released;
    good = quantize(source, format, codes.data<uint8_t>(), scales.data<uint16_t>());
  }
  return PyBool_FromLong(good);
}

}  // namespace

std::vector<PyMethodDef> layer_functions() {
  return {
      method<layer_new>("layer_new"),
      method<layer_load>("layer_load"),
      method<layer_resident_bytes>("layer_resident_bytes"),
      method<layer_first_missing>("layer_first_missing"),
      method<quantize_matrix>("quantize"),
  };
}

}  // namespace duck
