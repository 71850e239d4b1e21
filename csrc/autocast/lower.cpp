// Autocast for the layers whose stock operators it casts. Linear and PReLU run in the lower precision. On
// CUDA softplus, and the norms other than batch norm, run in float32; on the CPU the 3-D pools do.
#include "autocast/lower.h"

#include <torch/library.h>

#include "ops/handle.h"
#include "ops/optional.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

Tensor autocast_to(at::ScalarType dtype, const Tensor& tensor, c10::DeviceType device) {
  const bool concerned = tensor.defined() && tensor.is_floating_point() &&
                         tensor.scalar_type() != at::kDouble && tensor.device().type() == device;
  if (concerned && !tensor.is_leaf() && tensor.requires_grad()) return cast(tensor, dtype);
  return at::autocast::cached_cast(dtype, tensor, device);
}

namespace {

// Calls the operator of this signature with its tensors cast, and autocast off.
template <c10::DeviceType kDevice, bool kLower, typename Signature>
struct Cast;

template <c10::DeviceType kDevice, bool kLower, typename Result, typename... Arguments>
struct Cast<kDevice, kLower, Result(Arguments...)> {
  template <const char* const* kName>
  static Result call(Arguments... arguments) {
    const c10::impl::ExcludeDispatchKeyGuard guard(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    static const auto op = handle<Result(Arguments...)>(*kName);
    return op.call(lowered(arguments)...);
  }

  static at::ScalarType dtype() {
    return kLower ? at::autocast::get_lower_precision_fp_from_device_type(kDevice) : at::kFloat;
  }
  static Tensor lowered(const Tensor& tensor) { return autocast_to(dtype(), tensor, kDevice); }
  static OptionalTensor lowered(const OptionalTensor& tensor) {
    return tensor.has_value() ? OptionalTensor(lowered(*tensor)) : std::nullopt;
  }
  template <typename T>
  static const T& lowered(const T& other) {
    return other;
  }
};

using Unary = Tensor(const Tensor&, const at::Scalar&, const at::Scalar&);
using Prelu = Tensor(const Tensor&, const Tensor&);
using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&);
using LayerNorm = Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&,
                         double);
using RmsNorm = Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, std::optional<double>);
using GroupNorm = Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double);
using MaxPool = Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool);
using AvgPool = Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool,
                       std::optional<int64_t>);
using AdaptivePool = Tensor(const Tensor&, IntArrayRef);

template <c10::DeviceType kDevice, bool kLower, typename Signature, const char* const* kName>
void enter(torch::Library& m) {
  m.impl(*kName, &Cast<kDevice, kLower, Signature>::template call<kName>);
}

constexpr const char* kLinear = "linear";
constexpr const char* kPrelu = "prelu";
constexpr const char* kSoftplus = "softplus";
constexpr const char* kLayerNorm = "layer_norm";
constexpr const char* kRmsNorm = "rms_norm";
constexpr const char* kGroupNorm = "group_norm";
constexpr const char* kGroupNormSilu = "group_norm_silu";
constexpr const char* kMaxPool3d = "max_pool3d";
constexpr const char* kAvgPool3d = "avg_pool3d";
constexpr const char* kAdaptiveMaxPool3d = "adaptive_max_pool3d";
constexpr const char* kAdaptiveAvgPool3d = "adaptive_avg_pool3d";

// Whether this torch's autocast has the operator run in float32 on CUDA: rms_norm does in 2.14, not in 2.11.
consteval bool stays_in_float32(std::string_view name) {
#define PATCHCONV_IS(operator_name, ...) name == #operator_name ||
  return AT_FORALL_FP32(PATCHCONV_IS) false;
#undef PATCHCONV_IS
}

TORCH_LIBRARY_IMPL(patchconv, AutocastCPU, m) {
  enter<c10::kCPU, true, Linear, &kLinear>(m);
  enter<c10::kCPU, true, Prelu, &kPrelu>(m);
  enter<c10::kCPU, false, MaxPool, &kMaxPool3d>(m);
  enter<c10::kCPU, false, AvgPool, &kAvgPool3d>(m);
  enter<c10::kCPU, false, AdaptivePool, &kAdaptiveMaxPool3d>(m);
  enter<c10::kCPU, false, AdaptivePool, &kAdaptiveAvgPool3d>(m);
}

TORCH_LIBRARY_IMPL(patchconv, AutocastCUDA, m) {
  enter<c10::kCUDA, true, Linear, &kLinear>(m);
  enter<c10::kCUDA, true, Prelu, &kPrelu>(m);
  enter<c10::kCUDA, false, Unary, &kSoftplus>(m);
  enter<c10::kCUDA, false, LayerNorm, &kLayerNorm>(m);
  if constexpr (stays_in_float32(kRmsNorm)) enter<c10::kCUDA, false, RmsNorm, &kRmsNorm>(m);
  enter<c10::kCUDA, false, GroupNorm, &kGroupNorm>(m);
  enter<c10::kCUDA, false, GroupNorm, &kGroupNormSilu>(m);
}

}  // namespace

}  // namespace patchconv
