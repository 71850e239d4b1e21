// The CUDA side of the convolutions (csrc/cuda/conv_native.cpp) with kernels that run on the CPU, on CPU
// tensors: operators patchconv_host::*, for tests/cuda/test_conv_native.py. Everything between the operators'
// arguments and the launches is the code that runs on a GPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include "core/conv_rules.h"
#include "core/settings.h"
#include "cuda/conv_native.h"
#include "cuda/conv_turn.h"
#include "cuda/kernel_call.h"
#include "ops/activation.h"
#include "ops/conv_checks.h"
#include "ops/handle.h"
#include "tiled/conv.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;

kernels::Stream current_stream(const Tensor&) { return nullptr; }
DeviceLimits device_limits() { return {.arch = 90}; }

// The masks of the installed library.
Tensor mask_backward(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  static const auto op = handle<Tensor(const Tensor&, const Tensor&, double, double)>("_mask_backward");
  return op.call(grad, bits, inside, outside);
}
Tensor mask_pack(const Tensor& input, Mask mask, double a, double b) {
  static const auto op = handle<Tensor(const Tensor&, int64_t, double, double)>("_mask_pack");
  return op.call(input, static_cast<int64_t>(mask), a, b);
}
Tensor mask_forward_(Tensor& input, Mask mask, double a, double b) {
  static const auto op = handle<Tensor(Tensor&, int64_t, double, double)>("_mask_forward_");
  return op.call(input, static_cast<int64_t>(mask), a, b);
}

namespace {

class HostEngine : public ConvEngine {
 public:
  int64_t stock_bytes(const ConvProblem&, ConvPass, at::ScalarType, at::MemoryFormat,
                      int64_t) const override {
    return 0;
  }
  TileStyle tile_style(const ConvProblem&, ConvPass, at::ScalarType) const override { return {}; }
  NativeKernel native_kernel(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                             at::MemoryFormat format) const override {
    return choose_native_kernel(problem, pass, dtype, format);
  }
  bool native_bits(const ConvProblem& problem, ConvPass pass, const Tensor& target) const override {
    return native_kernel_writes_bits(problem, pass, target);
  }
  void native_grid(const ConvProblem& problem, ConvPass pass, const Tensor& source, const Tensor& bits,
                   const Tensor& weight, const Epilogue& epilogue, const Tensor& target) const override {
    run_native_grid(problem, pass, source, bits, weight, epilogue, target);
  }
  Tensor native_weight(const ConvProblem& problem, const Tensor& big, const Tensor& small,
                       const Tensor& bits) const override {
    return run_native_weight(problem, big, small, bits);
  }
  Tensor native_bias(const Tensor& grad, const Tensor& bits) const override {
    return run_native_channel_sums(grad, bits);
  }
};

const HostEngine engine;

// The kernels that ran since the last call.
std::string kernels_that_ran() {
  std::string names;
  for (const PathRecord& record : stop_path_log()) {
    names += std::string(names.empty() ? "" : " ") + (record.kernel != nullptr ? record.kernel : "stock") +
             ":" + std::to_string(record.tiles);
  }
  start_path_log();
  return names;
}

ConvSpec spec_of(int64_t dims, bool transposed, at::IntArrayRef stride, at::IntArrayRef padding,
                 at::IntArrayRef output_padding, at::IntArrayRef dilation, int64_t groups,
                 std::string_view mode, at::OptionalIntArrayRef splits) {
  const auto d = static_cast<int>(dims);
  return transposed ? transposed_spec(d, stride, padding, output_padding, groups, dilation, splits)
                    : conv_spec(d, stride, padding, dilation, groups, mode, splits);
}

Tensor conv(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t dims,
            bool transposed, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
            at::IntArrayRef dilation, int64_t groups, std::string_view mode, at::OptionalIntArrayRef splits) {
  const SettingsGuard native({.backend = Backend::kNative});
  return conv_forward(
      engine, spec_of(dims, transposed, stride, padding, output_padding, dilation, groups, mode, splits),
      input, weight, bias);
}

ConvGrads conv_gradients(const Tensor& grad, const OptionalTensor& bits, const OptionalTensor& input,
                         const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                         c10::SymIntArrayRef weight_size, int64_t dims, bool transposed,
                         at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                         at::IntArrayRef dilation, int64_t groups, std::string_view mode,
                         at::OptionalIntArrayRef splits, std::array<bool, 3> mask) {
  const SettingsGuard native({.backend = Backend::kNative});
  return conv_backward(
      engine, spec_of(dims, transposed, stride, padding, output_padding, dilation, groups, mode, splits),
      {grad, input, weight, input_size, weight_size, mask, or_none(bits)});
}

// Of a 2-D convolution: the result and its bits, which are empty where the kernel cannot write them.
std::tuple<Tensor, Tensor> fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                 const OptionalTensor& scale, const OptionalTensor& residual,
                                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                 int64_t groups, std::string_view mode, at::OptionalIntArrayRef splits) {
  const SettingsGuard native({.backend = Backend::kNative});
  const ConvProblem problem(conv_spec(2, stride, padding, dilation, groups, mode, splits),
                            input.sizes().vec(), weight.sizes().vec());
  const Tensor y = at::empty(problem.small_sizes(problem.batch),
                             input.options().memory_format(output_format(input, weight)));
  Epilogue epilogue{bias, scale, residual, /*relu=*/true};
  Tensor bits = at::empty({0}, input.options().dtype(at::kByte));
  if (engine.native_bits(problem, ConvPass::kSmall, y)) {
    epilogue.bits = bits = at::full({(y.numel() + 7) / 8}, 0xEE, input.options().dtype(at::kByte));
  }
  engine.native_grid(problem, ConvPass::kSmall, input, Tensor(), weight, epilogue, y);
  return {y, bits};
}

// The kernel that a convolution's forward pass would use ("" for none) if a rule takes this project's kernels
// for the pass `rule`.
std::string choice(const Tensor& input, const Tensor& weight, int64_t groups, std::string_view backend,
                   std::string_view rule) {
  const SettingsGuard with({.backend = backend == "native" ? Backend::kNative
                                       : backend == "aten" ? Backend::kAten
                                                           : Backend::kAuto});
  ConvRule native;
  native.pass = rule;
  native.native = true;
  set_conv_rules(90, std::vector<ConvRule>{native});
  const int64_t one = 1;
  const ConvProblem problem(conv_spec(2, one, one, one, groups, "zeros", std::nullopt), input.sizes().vec(),
                            weight.sizes().vec());
  const NativeKernel kernel =
      engine.native_kernel(problem, ConvPass::kSmall, input.scalar_type(), at::MemoryFormat::Contiguous);
  return kernel ? kernel.name : "";
}

TORCH_LIBRARY(patchconv_host, m) {
  start_path_log();
#define GEOMETRY                                                                                       \
  "int dims, bool transposed, int[] stride, int[] padding, int[] output_padding, int[] dilation, int " \
  "groups, "                                                                                           \
  "str mode, int[]? splits"
  m.def("conv(Tensor input, Tensor weight, Tensor? bias, " GEOMETRY ") -> Tensor", &conv);
  m.def(
      "conv_gradients(Tensor grad, Tensor? bits, Tensor? input, Tensor? weight, SymInt[] input_size, "
      "SymInt[] "
      "weight_size, " GEOMETRY ", bool[3] mask) -> (Tensor, Tensor, Tensor)",
      &conv_gradients);
  m.def(
      "fused(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, int[] stride, int[] "
      "padding, int[] dilation, int groups, str mode, int[]? splits) -> (Tensor, Tensor)",
      &fused);
  m.def("copy_turned(Tensor source, int[] first, Tensor(a!) to) -> bool", &copy_turned);
  m.def("kernels_that_ran() -> str", &kernels_that_ran);
  m.def("set_workspace_limit(int bytes) -> ()", [](int64_t bytes) { set_workspace_limit(bytes); });
  m.def("choice(Tensor input, Tensor weight, int groups, str backend, str rule) -> str", &choice);
#undef GEOMETRY
}

}  // namespace

}  // namespace patchconv
