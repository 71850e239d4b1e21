// A tensor in autocast's dtype. A parameter's cast is cached, as stock does; an activation is cast by our own
// operator, which can make it again in backward.
#pragma once

#include <ATen/autocast_mode.h>

#include "ops/combine.h"

namespace patchconv {

at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& tensor, c10::DeviceType device);

}  // namespace patchconv
