// Autocast: convolutions run in the lower precision of the device, as torch's own do.
#include "autocast/lower.h"
#include "ops/conv_rooms.h"
#include "ops/handle.h"

namespace patchconv {

using at::Tensor;

namespace {

using Fused = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef, at::IntArrayRef,
                     at::IntArrayRef, int64_t, const OptionalTensor&, const OptionalTensor&, bool,
                     std::string_view, at::OptionalIntArrayRef);

template <c10::DeviceType kDevice>
struct AutocastRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const c10::impl::ExcludeDispatchKeyGuard guard(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
    auto lower = [&](const Tensor& tensor) { return autocast_to(dtype, tensor, kDevice); };
    return call_conv(spec, lower(input), lower(weight),
                     bias.has_value() ? OptionalTensor(lower(*bias)) : std::nullopt);
  }
};

// The scale is not cast: it is applied to sums in float32.
template <c10::DeviceType kDevice>
Tensor fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
             at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, const OptionalTensor& scale,
             const OptionalTensor& residual, bool relu, std::string_view padding_mode,
             at::OptionalIntArrayRef splits) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  const auto lower = [&](const Tensor& tensor) { return autocast_to(dtype, tensor, kDevice); };
  const auto lower_optional = [&](const OptionalTensor& tensor) {
    return tensor.has_value() ? OptionalTensor(lower(*tensor)) : std::nullopt;
  };
  static const auto op = handle<Fused>("conv2d_fused");
  return op.call(lower(input), lower(weight), lower_optional(bias), stride, padding, dilation, groups, scale,
                 lower_optional(residual), relu, padding_mode, splits);
}

template <c10::DeviceType kDevice>
void register_conv_autocast(torch::Library& m) {
  register_conv_forward<AutocastRoom<kDevice>>(m);
  m.impl("conv2d_fused", &fused<kDevice>);
}

TORCH_LIBRARY_IMPL(patchconv, AutocastCPU, m) { register_conv_autocast<c10::kCPU>(m); }

TORCH_LIBRARY_IMPL(patchconv, AutocastCUDA, m) { register_conv_autocast<c10::kCUDA>(m); }

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
