// patchconv::cast, through the dispatcher: x.to(dtype), whose output can be rebuilt.
#pragma once

#include <ATen/core/Tensor.h>

namespace patchconv {

at::Tensor cast(const at::Tensor& x, at::ScalarType dtype);

}  // namespace patchconv
