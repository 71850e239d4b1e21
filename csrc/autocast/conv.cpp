// Autocast: convolutions run in the lower precision of the device, as torch's own do.
#include "autocast/lower.h"
#include "ops/conv_rooms.h"

namespace patchconv {

using at::Tensor;

namespace {

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

TORCH_LIBRARY_IMPL(patchconv, AutocastCPU, m) { register_conv_forward<AutocastRoom<c10::kCPU>>(m); }

TORCH_LIBRARY_IMPL(patchconv, AutocastCUDA, m) { register_conv_forward<AutocastRoom<c10::kCUDA>>(m); }

}  // namespace

std::tuple<Tensor, Tensor, OptionalTensor> autocast_as_enabled(const Tensor& input, const Tensor& weight,
                                                               const OptionalTensor& bias) {
  const c10::DeviceType device = input.device().type();
  const bool on = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
                  !c10::impl::tls_is_dispatch_key_excluded(
                      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  if (!on) return {input, weight, bias};
  // Not cached_cast: it takes a transform's wrapper for a tensor of no device.
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  auto lower = [&](const Tensor& tensor) {
    return tensor.is_floating_point() && tensor.scalar_type() != at::kDouble ? tensor.to(dtype) : tensor;
  };
  return {lower(input), lower(weight), bias.has_value() ? OptionalTensor(lower(*bias)) : std::nullopt};
}

}  // namespace patchconv
