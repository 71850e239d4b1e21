// A tensor argument that may be left out. Python's None arrives as no value, an undefined tensor in one that
// is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace patchconv {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

}  // namespace patchconv
