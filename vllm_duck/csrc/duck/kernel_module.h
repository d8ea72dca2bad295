// The functions of vllm_duck.executor._kernel, by the source that has them.
#pragma once

#include "base/arguments.h"
#include "duck/layer.h"

namespace duck {

std::vector<PyMethodDef> layer_functions();
std::vector<PyMethodDef> engine_functions();
std::vector<PyMethodDef> codec_functions();

// DuckCheckpointError.
extern PyObject* checkpoint_error;

template <>
inline constexpr const char* binding::capsule_name<Layer> = "vllm_duck.Layer";

}  // namespace duck
