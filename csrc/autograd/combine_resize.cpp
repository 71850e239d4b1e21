// Upsampling and padding: cheap operators whose output is usually larger than their input, so that a consumer
// that needs the output in backward does better to have it rebuilt.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/_upsample_nearest_exact3d.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/reflection_pad1d_backward.h>
#include <ATen/ops/reflection_pad2d_backward.h>
#include <ATen/ops/reflection_pad3d_backward.h>
#include <ATen/ops/replication_pad1d_backward.h>
#include <ATen/ops/replication_pad2d_backward.h>
#include <ATen/ops/replication_pad3d_backward.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/upsample_nearest3d.h>
#include <ATen/ops/upsample_trilinear3d.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <string>

#include "autograd/activation.h"
#include "core/settings.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

namespace {

// A node on top of stock's, which saves only sizes: it can rebuild the output.
class RemadeBackward final : public LeanNode {
 public:
  RemadeBackward() : LeanNode("patchconv::RemadeBackward") {}
  Source input;
  std::function<Tensor(const Tensor&)> make;

 protected:
  variable_list backward(const Tensor& grad) override { return {grad}; }
  Tensor rebuild() override { return make(input.get(*this)); }
  std::vector<Source*> sources() override { return {&input}; }
  bool may_promote() const override { return true; }
};

// make(x), for an operator whose stock node saves only sizes.
Tensor remade(const Tensor& x, std::function<Tensor(const Tensor&)> make) {
  Tensor y = make(x);
  // Autocast may have computed in another dtype; then x alone is not enough to rebuild y.
  if (!use_lean_node(x) || y.is_view() || y.is_same(x) || y.scalar_type() != x.scalar_type()) return y;
  const auto node = make_node<RemadeBackward>(y);
  node->input.note(x);
  node->make = std::move(make);
  if (recompute() && 2 * x.numel() <= y.numel()) node->hold(x);
  LeanNode::attach(y, node);
  return y;
}

using Sizes = at::OptionalIntArrayRef;
using Scales = std::optional<at::ArrayRef<double>>;

Tensor resized(const Tensor& x, Sizes size, Scales scales, c10::string_view mode, bool align_corners) {
  const int64_t dims = x.dim() - 2;
  if (mode == "nearest") {
    if (dims == 1) return at::upsample_nearest1d(x, size, scales);
    if (dims == 2) return at::upsample_nearest2d(x, size, scales);
    if (dims == 3) return at::upsample_nearest3d(x, size, scales);
  } else if (mode == "nearest-exact") {
    if (dims == 1) return at::_upsample_nearest_exact1d(x, size, scales);
    if (dims == 2) return at::_upsample_nearest_exact2d(x, size, scales);
    if (dims == 3) return at::_upsample_nearest_exact3d(x, size, scales);
  } else if (mode == "linear" && dims == 1) {
    return at::upsample_linear1d(x, size, align_corners, scales);
  } else if (mode == "bilinear" && dims == 2) {
    return at::upsample_bilinear2d(x, size, align_corners, scales);
  } else if (mode == "bicubic" && dims == 2) {
    return at::upsample_bicubic2d(x, size, align_corners, scales);
  } else if (mode == "trilinear" && dims == 3) {
    return at::upsample_trilinear3d(x, size, align_corners, scales);
  }
  TORCH_CHECK_VALUE(
      false, "patchconv::upsample: expected mode nearest, nearest-exact, linear (N, C, W), bilinear or ",
      "bicubic (N, C, H, W), or trilinear (N, C, D, H, W), got ", mode, " for input of shape ", x.sizes());
}

Tensor upsample(const Tensor& x, Sizes size, Scales scales, c10::string_view mode, bool align_corners) {
  using Ints = std::optional<std::vector<int64_t>>;
  using Doubles = std::optional<std::vector<double>>;
  return remade(
      x, [size = size ? Ints(size->vec()) : Ints(), scales = scales ? Doubles(scales->vec()) : Doubles(),
          mode = std::string(mode), align_corners](const Tensor& input) {
        return resized(input, size ? Sizes(*size) : Sizes(), scales ? Scales(*scales) : Scales(), mode,
                       align_corners);
      });
}

// ---------------------------------------------------------------------------------------------------------

// Padding that repeats the image. Stock's node saves the input but reads only its sizes.
class PadBackward final : public LeanNode {
 public:
  PadBackward() : LeanNode("patchconv::PadBackward") {}
  Source input;
  StandIn like;
  std::vector<int64_t> pad;
  bool reflect = false;

 protected:
  variable_list backward(const Tensor& grad) override {
    constexpr auto reflection = std::array{&at::reflection_pad1d_backward, &at::reflection_pad2d_backward,
                                           &at::reflection_pad3d_backward};
    constexpr auto replication = std::array{&at::replication_pad1d_backward, &at::replication_pad2d_backward,
                                            &at::replication_pad3d_backward};
    const auto gradient = (reflect ? reflection : replication)[pad.size() / 2 - 1];
    return {with_flat_slope(gradient(grad, like.tensor(grad), pad))};
  }
  Tensor rebuild() override { return at::pad(input.get(*this), pad, reflect ? "reflect" : "replicate"); }
  std::vector<Source*> sources() override { return {&input}; }
  bool may_promote() const override { return true; }
};

Tensor pad(const Tensor& x, IntArrayRef pad, c10::string_view mode, std::optional<double> value) {
  const auto dims = static_cast<int64_t>(pad.size() / 2);
  if (mode != "reflect" && mode != "replicate") {
    return remade(x, [pad = pad.vec(), mode = std::string(mode), value](const Tensor& input) {
      return at::pad(input, pad, mode, value);
    });
  }
  Tensor y;
  if (!use_lean_node(x) || value || pad.size() % 2 != 0 || (x.dim() != dims + 1 && x.dim() != dims + 2) ||
      dims > 3 || dims < 1) {
    return at::pad(x, pad, mode, value);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::pad(x, pad, mode);
  }
  if (y.scalar_type() != x.scalar_type()) return at::pad(x, pad, mode);  // autocast, as in remade()
  const auto node = make_node<PadBackward>(x);
  node->input.note(x);
  node->like = StandIn(x);
  node->pad = pad.vec();
  node->reflect = mode == "reflect";
  LeanNode::attach(y, node);
  return y;
}

Tensor stock_upsample(const Tensor& x, Sizes size, Scales scales, c10::string_view mode, bool align_corners) {
  return resized(x, size, scales, mode, align_corners);
}
Tensor stock_pad(const Tensor& x, IntArrayRef pad, c10::string_view mode, std::optional<double> value) {
  return at::pad(x, pad, mode, value);
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("upsample", &upsample);
  m.impl("pad", &pad);
}

void stock_resize(torch::Library& m) {
  m.impl("upsample", &stock_upsample);
  m.impl("pad", &stock_pad);
}
TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) { stock_resize(m); }
TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { stock_resize(m); }

}  // namespace

}  // namespace patchconv
