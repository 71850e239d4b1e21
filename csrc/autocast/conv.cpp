// Autocast: convolutions run in the lower precision of the device, as torch's own do.
#include "ops/conv.h"
#include "autocast/lower.h"

namespace patchconv {

using at::Tensor;

namespace {

template <c10::DeviceType kDevice>
struct AutocastRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const auto guard = below();
    return call_conv(spec, lower(input), lower(weight), lower(bias));
  }
  // The scale is not cast: it is applied to sums in float32.
  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    const auto guard = below();
    const OptionalTensor residual = lower(parts.residual);
    return call_conv_fused(spec, lower(input), lower(weight), lower(bias),
                           {parts.scale, residual, parts.relu, parts.mask});
  }

 private:
  static c10::impl::ExcludeDispatchKeyGuard below() {
    return c10::impl::ExcludeDispatchKeyGuard(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  }
  static Tensor lower(const Tensor& tensor) {
    return autocast_to(at::autocast::get_lower_precision_fp_from_device_type(kDevice), tensor, kDevice);
  }
  static OptionalTensor lower(const OptionalTensor& tensor) {
    return tensor.has_value() ? OptionalTensor(lower(*tensor)) : std::nullopt;
  }
};

TORCH_LIBRARY_IMPL(patchconv, AutocastCPU, m) { register_conv<AutocastRoom<c10::kCPU>>(m); }

TORCH_LIBRARY_IMPL(patchconv, AutocastCUDA, m) { register_conv<AutocastRoom<c10::kCUDA>>(m); }

}  // namespace

std::tuple<Tensor, Tensor, OptionalTensor> autocast_as_enabled(const Tensor& input, const Tensor& weight,
                                                               const OptionalTensor& bias, bool wrapped) {
  const c10::DeviceType device = input.device().type();
  const bool on = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
                  !c10::impl::tls_is_dispatch_key_excluded(
                      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  if (!on) return {input, weight, bias};
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  auto lower = [&](const Tensor& tensor) {
    if (!wrapped) return autocast_to(dtype, tensor, device);
    return tensor.is_floating_point() && tensor.scalar_type() != at::kDouble ? tensor.to(dtype) : tensor;
  };
  return {lower(input), lower(weight), bias.has_value() ? OptionalTensor(lower(*bias)) : std::nullopt};
}

}  // namespace patchconv
