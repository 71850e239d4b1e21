// A tensor in autocast's dtype. Casts of parameters are cached, as in stock PyTorch; activations are cast by
// patchconv::cast, whose output can be rebuilt in backward.
#pragma once

#include <ATen/autocast_mode.h>

#include "ops/combine.h"

namespace patchconv {

at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& tensor, c10::DeviceType device);

}  // namespace patchconv
