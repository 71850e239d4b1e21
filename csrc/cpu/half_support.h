// Whether stock PyTorch's oneDNN multiplies a half-precision dtype on this processor.
#pragma once

#include <c10/core/ScalarType.h>

namespace patchconv {

bool multiplies_half(c10::ScalarType dtype);

}  // namespace patchconv
