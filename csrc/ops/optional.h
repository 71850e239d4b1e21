// A tensor argument that may be left out. Python's None arrives as no value, an undefined tensor in one that
// is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace patchconv {

using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor or_none(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}
inline OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

}  // namespace patchconv
