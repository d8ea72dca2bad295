// The functions of vllm_duck.models.cpu._host, by the source that has them. The modules
// of models/cpu/ check shapes, dtypes and layouts: nothing here does.
#pragma once

#include "base/arguments.h"
#include "host/host.h"
#include "host/weights.h"

namespace duck::host {

std::vector<PyMethodDef> weight_functions();
std::vector<PyMethodDef> layer_functions();

}  // namespace duck::host

namespace duck::binding {

template <>
inline constexpr const char* capsule_name<host::Host> = "vllm_duck.Host";
template <>
inline constexpr const char* capsule_name<host::Step> = "vllm_duck.Step";
template <>
inline constexpr const char* capsule_name<host::Norm> = "vllm_duck.Norm";
template <>
inline constexpr const char* capsule_name<host::Linear> = "vllm_duck.Linear";
template <>
inline constexpr const char* capsule_name<host::Mlp> = "vllm_duck.Mlp";
template <>
inline constexpr const char* capsule_name<host::Router> = "vllm_duck.Router";
template <>
inline constexpr const char* capsule_name<host::Attention> = "vllm_duck.Attention";

}  // namespace duck::binding
