// The CUDA part of the convolutions: row strips through cuDNN, or this project's kernels
// (conv_native.h).
//
// cuDNN writes a channels_last strip straight into the result, which is the only full-size tensor; other
// layouts take one strip of workspace. Work is queued on the current stream of the input's device; nothing
// synchronises. Accumulation is cuDNN's: float32 for half precision and float32 (TF32 where torch allows it).
#include <ATen/Context.h>
#include <ATen/ops/cudnn_convolution.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>

#include "cuda/conv_native.h"
#include "cuda/conv_turn.h"
#include "tiled/conv.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;

namespace {

// cuDNN's kernels use 32-bit indices: it cuts larger problems into pieces or takes slower algorithms.
constexpr int64_t kMaxElements = (int64_t{1} << 31) - 1;

class CudaEngine : public ConvEngine {
 public:
  int64_t stock_bytes(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                      at::MemoryFormat format, int64_t /*enough*/) const override {
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t big = c10::multiply_integers(problem.big_sizes(problem.batch));
    const int64_t small = c10::multiply_integers(problem.small_sizes(problem.batch));
    if (big <= kMaxElements && small <= kMaxElements && problem.kernel_volume() == 1) return 0;
    // cuDNN converts NCHW tensors to its own layout and back; channels_last ones it takes as they are.
    const bool reordered =
        format == at::MemoryFormat::Contiguous || big > kMaxElements || small > kMaxElements;
    return reordered ? (big + small) * element : 0;
  }

  TileStyle tile_style(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype) const override {
    TileStyle style;
    const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    style.dtype = half && pass == ConvPass::kWeight ? at::kFloat : dtype;
    if (dtype != at::kDouble) {
      style.format =
          problem.dims.size() == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    }
    const auto element = static_cast<int64_t>(c10::elementSize(style.dtype));
    style.cost.big_bytes = problem.big_channels * element;
    style.cost.small_bytes = problem.small_channels * element;
    return style;
  }

  bool convolve_into(const Tensor& tile, const Tensor& weight, const std::optional<Tensor>& bias,
                     const ConvProblem& problem, at::IntArrayRef padding,
                     const Tensor& target) const override {
    const bool dense = tile.dim() == 4 && tile.scalar_type() == target.scalar_type() &&
                       tile.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                       target.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                       target.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    if (!dense || tile.scalar_type() == at::kDouble || !at::globalContext().userEnabledCuDNN()) return false;
    const auto& context = at::globalContext();
    Tensor out = target;
    at::cudnn_convolution_out(out, tile, weight, padding, values(problem, &ConvDim::stride),
                              values(problem, &ConvDim::dilation), problem.groups, context.benchmarkCuDNN(),
                              context.deterministicCuDNN() || context.deterministicAlgorithms(),
                              context.allowTF32CuDNN(at::Float32Op::CONV));
    if (bias.has_value()) out.add_(bias->view({1, -1, 1, 1}));
    return true;
  }

  Tensor load(const Tensor& source, const Region& region, PaddingMode mode,
              const TileStyle& style) const override {
    const Tensor images = source.narrow(0, region.batch.begin, region.batch.size());
    bool inside = true;
    std::vector<int64_t> first;
    for (size_t d = 0; d < region.ranges.size(); ++d) {
      const Range& range = region.ranges[d];
      first.push_back(range.begin);
      inside = inside && range.begin >= 0 && range.end <= source.size(static_cast<int64_t>(2 + d));
    }
    if (backend() != Backend::kAten && source.scalar_type() == style.dtype &&
        (inside || mode == PaddingMode::kZeros)) {
      const Tensor tile =
          at::empty(region.sizes(source.size(1)), source.options().memory_format(style.format));
      if (tile.numel() > 0 && copy_turned(images, first, tile)) return tile;
    }
    return ConvEngine::load(source, region, mode, style);
  }

  void store(const Tensor& tile, const Region& region, const Tensor& target) const override {
    const std::vector<int64_t> first(region.ranges.size(), 0);
    if (backend() != Backend::kAten && copy_turned(tile, first, region.view(target))) return;
    ConvEngine::store(tile, region, target);
  }

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

struct CudaRoom {
  static const CudaEngine& engine() {
    static const CudaEngine engine;
    return engine;
  }
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const c10::cuda::CUDAGuard guard(input.device());
    return conv_forward(engine(), spec, input, weight, bias);
  }
  static ConvGrads backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
    const c10::cuda::CUDAGuard guard(args.grad_output.device());
    return conv_backward(engine(), spec, args);
  }
  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    const c10::cuda::CUDAGuard guard(input.device());
    return conv_fused(engine(), spec, input, weight, bias, parts);
  }
};

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) { register_conv<CudaRoom>(m); }

const RegisterEngine registered("cuda", CudaRoom::engine());

}  // namespace

}  // namespace patchconv
