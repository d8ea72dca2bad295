// All that kernels.h lists, for one instruction set.
// Include after the target pragma of the source that uses it; G names its kernels.
#pragma once

#include "host/kernels/attend.h"
#include "host/kernels/dense.h"
#include "host/kernels/router.h"

namespace duck {
namespace host {
namespace {

template <class G>
constexpr HostKernels host_kernels(const char* name) {
  return {name,          norm_call, linear_call<G>, mlp_call<G>,
          route_call<G>, add_call,  attend_call<G>};
}

}  // namespace
}  // namespace host
}  // namespace duck
