// Dropout and its variants: nothing is saved but the seed of the mask.
//
// The seed is a tensor drawn from torch's own generator, so that torch.manual_seed, checkpointing and graph
// capture work. Each element of the mask follows from it (core/philox.h) and is computed again in backward.
// Where there is no kernel for that (on CUDA float64, and every dtype unless the backend is "native"), stock
// operators draw the mask and it is saved as bits. Dropping whole channels takes one number per channel,
// computed from the seed in either case.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alpha_dropout.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/feature_alpha_dropout.h>
#include <ATen/ops/feature_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "autograd/activation.h"
#include "core/settings.h"
#include "ops/handle.h"

namespace patchconv {

using at::Tensor;

namespace {

// kept: x * scale + shift; dropped: x * 0 + fill
struct Noise {
  double p = 0.5, scale = 1, shift = 0, fill = 0;
};

Noise plain(double p) { return {p, p < 1 ? 1 / (1 - p) : 0, 0, 0}; }

// Keeps the mean and variance of a SELU's output; https://arxiv.org/abs/1706.02515, section 3.
Noise alpha(double p) {
  constexpr double kAlpha = 1.7580993408473766;
  if (p >= 1) return {1, 0, 0, 0};
  const double a = 1 / std::sqrt((kAlpha * kAlpha * p + 1) * (1 - p));
  return {p, a, kAlpha * a * p, kAlpha * a * p - kAlpha * a};
}

Tensor draw_seed(const Tensor& x) {
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, x.options().dtype(at::kLong));
}

Tensor call_dropout(const Tensor& x, const Tensor& seed, const Noise& n) {
  static const auto op =
      handle<Tensor(const Tensor&, const Tensor&, double, double, double, double)>("_dropout");
  return op.call(x, seed, n.p, n.scale, n.shift, n.fill);
}

// The same mask and scale for the gradient.
Noise for_gradient(const Noise& n) { return {n.p, n.scale, 0, 0}; }

class DropoutBackward final : public LeanNode {
 public:
  DropoutBackward() : LeanNode("patchconv::DropoutBackward") {}
  Source input, seed;  // seed: the seed, or the mask's bits
  Noise noise;
  bool bits = false;
  std::vector<c10::SymInt> strides;

  static Tensor apply_bits(const Tensor& x, const Tensor& mask, const Noise& n) {
    const Tensor factor = mask_backward(at::ones_like(x), mask, n.scale, 0);
    if (n.shift == 0 && n.fill == 0) return x.mul(factor);
    return x.mul(factor).add(mask_backward(at::ones_like(x), mask, n.shift, n.fill));
  }

 protected:
  variable_list backward(const Tensor& grad) override {
    const Tensor g = in_layout(grad, strides);
    return {bits ? apply_bits(g, seed.get(*this), for_gradient(noise))
                 : call_dropout(g, seed.get(*this), for_gradient(noise))};
  }
  Tensor rebuild() override {
    const Tensor x = in_layout(input.get(*this), strides);
    return bits ? apply_bits(x, seed.get(*this), noise) : call_dropout(x, seed.get(*this), noise);
  }
  std::vector<Source*> sources() override { return {&input}; }
  std::vector<Source*> others() override { return {&seed}; }
};

// For second derivatives: the same mask again.
struct DropoutAgain : torch::autograd::Function<DropoutAgain> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& seed, double p,
                        double scale, double shift, double fill) {
    ctx->save_for_backward({seed});
    ctx->saved_data["numbers"] = std::vector<double>{p, scale};
    ctx->saved_data["strides"] = x.sym_strides();
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_dropout(x, seed, {p, scale, shift, fill});
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    const Tensor grad = in_layout(grads[0], ctx->saved_data["strides"].toSymIntVector());
    variable_list result(6);
    result[0] = call_dropout(grad, ctx->get_saved_variables()[0], {numbers[0], numbers[1], 0, 0});
    return result;
  }
};

Tensor dropout_by_seed(const Tensor& x, const Tensor& seed, double p, double scale, double shift,
                       double fill) {
  if (needs_node(x)) return DropoutAgain::apply(x, seed, p, scale, shift, fill);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_dropout(x, seed, {p, scale, shift, fill});
}

// Whether there is a kernel that computes the mask from the seed.
bool philox(const Tensor& x) {
  return !x.is_cuda() || (backend() == Backend::kNative && x.scalar_type() != at::kDouble);
}

Tensor elementwise(const Tensor& input, const Noise& noise, bool in_place) {
  const bool recorded = needs_node(input);
  if (in_place) torch::autograd::check_inplace(input, recorded);
  Source source;
  if (recorded) source.note(input);
  Tensor y, kept;
  bool bits = false;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor x = input.is_non_overlapping_and_dense() ? input : at::empty_like(input).copy_(input);
    if (philox(x)) {
      kept = draw_seed(x);
      y = call_dropout(x, kept, noise);
    } else {
      bits = true;
      kept = mask_pack(at::empty_like(x).bernoulli_(1 - noise.p), Mask::kRelu, 0, 0);
      y = DropoutBackward::apply_bits(x, kept, noise);
    }
    if (in_place) input.copy_(y);
  }
  const Tensor& result = in_place ? input : y;
  if (recorded) {
    const auto node = make_node<DropoutBackward>(input);
    node->noise = noise;
    node->bits = bits;
    node->strides = y.sym_strides().vec();
    node->input = std::move(source);
    node->seed.keep(kept);
    LeanNode::attach(result, node, in_place);
  } else if (in_place) {
    torch::autograd::impl::bump_version(input);
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------

class FeatureDropoutBackward final : public LeanNode {
 public:
  FeatureDropoutBackward() : LeanNode("patchconv::FeatureDropoutBackward") {}
  Source input, seed;  // seed: the seed, or the mask's bits
  Noise noise;
  bool bits = false;

  // One number per channel, (N, C, 1, ...).
  static Tensor of_channels(const Tensor& like, const Tensor& seed, bool bits, const Noise& n, bool shifts) {
    std::vector<c10::SymInt> shape(like.dim(), 1);
    shape[0] = like.sym_size(0);
    shape[1] = like.sym_size(1);
    const Tensor ones = at::ones_symint(shape, like.options());
    if (!bits) {
      return shifts ? call_dropout(ones.zero_(), seed, {n.p, 0, n.shift, n.fill})
                    : call_dropout(ones, seed, for_gradient(n));
    }
    return shifts ? mask_backward(ones, seed, n.shift, n.fill) : mask_backward(ones, seed, n.scale, 0);
  }
  static Tensor apply_to(const Tensor& x, const Tensor& seed, bool bits, const Noise& n) {
    const Tensor y = x.mul(of_channels(x, seed, bits, n, false));
    return n.shift == 0 && n.fill == 0 ? y : y.add(of_channels(x, seed, bits, n, true));
  }

 protected:
  variable_list backward(const Tensor& grad) override {
    return {apply_to(grad, seed.get(*this), bits, for_gradient(noise))};
  }
  Tensor rebuild() override { return apply_to(input.get(*this), seed.get(*this), bits, noise); }
  std::vector<Source*> sources() override { return {&input}; }
  std::vector<Source*> others() override { return {&seed}; }
};

Tensor by_channel(const char* name, const Tensor& x, const Noise& noise) {
  TORCH_CHECK_VALUE(x.dim() >= 2, name, ": expected input to have at least 2 dimensions (N, C, ...), got ",
                    x.dim());
  Tensor y, seed;
  const bool bits = !philox(x);
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (!bits) {
      seed = draw_seed(x);
    } else {
      const Tensor channels = at::empty_symint({x.sym_size(0), x.sym_size(1)}, x.options());
      seed = mask_pack(channels.bernoulli_(1 - noise.p), Mask::kRelu, 0, 0);
    }
    y = FeatureDropoutBackward::apply_to(x, seed, bits, noise);
  }
  if (!needs_node(x)) return y;
  const auto node = make_node<FeatureDropoutBackward>(x);
  node->noise = noise;
  node->bits = bits;
  node->input.note(x);
  node->seed.keep(seed);
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

// Whether this library serves the call; the others go to stock PyTorch.
bool serves_dropout(const char* name, const Tensor& x, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, name, ": expected p to be between 0 and 1, got ", p);
  return served(x) && !has_tangent(x);
}

Tensor dropout(const Tensor& x, double p) {
  return serves_dropout("dropout", x, p) ? elementwise(x, plain(p), false) : at::dropout(x, p, true);
}
Tensor& dropout_(Tensor& x, double p) {
  if (!serves_dropout("dropout_", x, p) || x.is_view()) return at::dropout_(x, p, true);
  elementwise(x, plain(p), true);
  return x;
}
Tensor alpha_dropout(const Tensor& x, double p) {
  return serves_dropout("alpha_dropout", x, p) ? elementwise(x, alpha(p), false)
                                               : at::alpha_dropout(x, p, true);
}
Tensor feature_dropout(const Tensor& x, double p) {
  return serves_dropout("feature_dropout", x, p) ? by_channel("feature_dropout", x, plain(p))
                                                 : at::feature_dropout(x, p, true);
}
Tensor feature_alpha_dropout(const Tensor& x, double p) {
  return serves_dropout("feature_alpha_dropout", x, p) ? by_channel("feature_alpha_dropout", x, alpha(p))
                                                       : at::feature_alpha_dropout(x, p, true);
}

void register_all(torch::Library& m) {
  m.impl("dropout", &dropout);
  m.impl("dropout_", &dropout_);
  m.impl("alpha_dropout", &alpha_dropout);
  m.impl("feature_dropout", &feature_dropout);
  m.impl("feature_alpha_dropout", &feature_alpha_dropout);
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  register_all(m);
  m.impl("_dropout", &dropout_by_seed);
}
// Without gradients the same masks are drawn from the same seeds.
TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) { register_all(m); }

TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("dropout", [](const Tensor& x, double p) { return at::dropout(x, p, true); });
  m.impl("dropout_", [](Tensor& x, double p) -> Tensor& { return at::dropout_(x, p, true); });
  m.impl("alpha_dropout", [](const Tensor& x, double p) { return at::alpha_dropout(x, p, true); });
  m.impl("feature_dropout", [](const Tensor& x, double p) { return at::feature_dropout(x, p, true); });
  m.impl("feature_alpha_dropout",
         [](const Tensor& x, double p) { return at::feature_alpha_dropout(x, p, true); });
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_dropout",
         [](const Tensor& x, const Tensor&, double, double, double, double) { return at::empty_like(x); });
}

}  // namespace

}  // namespace patchconv
