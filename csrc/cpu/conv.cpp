// The CPU's part of the convolutions: how much memory stock operators take, in which form tiles compute
// fastest, and registration.
//
// oneDNN serves float32, best from channels_last: for NCHW tensors it makes reordered copies of input and
// output, so these are cut into strips that are converted to channels_last in the cache. float64, and
// whatever else oneDNN does not serve, goes through a column buffer of C*R*S values per output pixel. Half
// precision that the processor cannot multiply is computed in float32. Accumulation is in float32, or float64
// for float64.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_convolution.h>

#include <c10/util/accumulate.h>
#include <omp.h>

#include <algorithm>
#include <limits>

#include "cpu/conv_copy.h"
#include "cpu/conv_weight.h"
#include "cpu/processor.h"
#include "tiled/conv.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;

namespace {

// Tiles larger than the last-level cache gain nothing; much smaller ones pay for more calls.
constexpr int64_t kPreferredBytes = int64_t{16} << 20;

// With wider zero padding of columns oneDNN is two to several hundred times slower: without AVX-512 beyond a
// few columns, with it where an output sees only padding (bench/padding.py).
int64_t widest_fast_padding(const ConvProblem& problem) {
  constexpr int64_t kFewColumns = 3;
  return has_avx512() ? problem.dims.back().reach() - 1 : kFewColumns;
}

// From here on half precision that the processor cannot multiply is faster in tiles of float32
// (bench/half.py).
constexpr int64_t kManyProducts = 1 << 18;
constexpr int64_t kLargeMatrix = 32 * 32;  // of a weight gradient's products

bool channels_last(at::MemoryFormat format) { return format != at::MemoryFormat::Contiguous; }

enum class Part { kWhole, kTile };

// Whether stock PyTorch hands this convolution to oneDNN: one call of a whole image, or of tiles, of which
// the padding is a part. The question is put with tensors of one element, expanded to the sizes.
bool served_by_onednn(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype, Part part) {
  const bool transposed = pass == ConvPass::kBig;
  const auto spread = [&](const std::vector<int64_t>& sizes) { return at::empty({1}, dtype).expand(sizes); };
  auto big = problem.big_sizes(1);
  std::vector<c10::SymInt> stride, padding, dilation;
  for (size_t d = 0; d < problem.dims.size(); ++d) {
    const ConvDim& dim = problem.dims[d];
    const int64_t pad =
        part == Part::kWhole ? std::max<int64_t>(std::min(dim.pad_before, dim.pad_after), 0) : 0;
    big[2 + d] += dim.pad_before + dim.pad_after - 2 * pad;
    padding.emplace_back(pad);
    stride.emplace_back(dim.stride);
    dilation.emplace_back(dim.dilation);
  }
  const std::vector<c10::SymInt> zeros(problem.dims.size(), 0);
  const auto backend = at::native::select_conv_backend(
      spread(transposed ? problem.small_sizes(1) : big), spread(problem.weight_sizes()), std::nullopt, stride,
      padding, dilation, transposed, zeros, problem.groups, std::nullopt);
  return backend == at::native::ConvBackend::Mkldnn || backend == at::native::ConvBackend::MkldnnTranspose;
}

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Whether oneDNN computes a tile of this dtype. Stock's own choice among libraries also depends on sizes and
// threads, and would take a column buffer for small tiles.
bool computed_by_onednn(at::ScalarType dtype) {
  return at::hasMKLDNN() && at::globalContext().userEnabledMkldnn() &&
         (dtype == at::kFloat || (dtype != at::kDouble && multiplies_half(dtype)));
}

// Two bugs of oneDNN's kernels, seen in torch 2.14.1, which stock PyTorch has too
// (tests/conv/test_onednn.py). The first: where output coordinates see only padding they read a null pointer,
// in half precision (AVX-512) and in channels_last (without it).
bool sees_only_padding(const ConvProblem& problem) {
  return std::any_of(problem.dims.begin(), problem.dims.end(),
                     [](const ConvDim& d) { return d.reads_only_padding(); });
}

// The second: in channels_last, with a stride and single input channels, they read past the end of the input;
// in torch 2.11 with one output channel too.
bool reads_past_end(const ConvProblem& problem) {
  const bool depthwise = problem.groups > 1 && problem.small_channels == problem.groups;
  return problem.big_channels == problem.groups && !depthwise &&
         std::any_of(problem.dims.begin(), problem.dims.end(), [](const ConvDim& d) { return d.stride > 1; });
}

// Whether a volume is thinner than the kernel.
bool thin_volume(const ConvProblem& problem, at::IntArrayRef sizes) {
  bool thin = false;
  for (size_t d = 0; d < problem.dims.size(); ++d) thin = thin || sizes[d] < problem.dims[d].reach();
  return thin && problem.dims.size() == 3;
}

// More bugs of its kernels for half precision, in stock PyTorch too, most of them in those for AMX (newer
// Xeons): wrong numbers, or memory that is not theirs. Found by random convolutions. What is computed in
// float32 for them is more than what was seen to fail. This is about forward passes over such an image.
bool wrong_in_half(const ConvProblem& problem, at::IntArrayRef sizes, at::IntArrayRef padding) {
  const ConvDim& column = problem.dims.back();
  const int64_t channels = problem.big_channels / problem.groups;
  const int64_t width = (sizes.back() + 2 * padding.back() - column.reach()) / column.stride + 1;
  const bool one_column = width == 1 && column.stride > 1;
  const bool padded_steps = column.stride > 4 && padding.back() > 0;
  const bool skips = problem.dims.size() == 3 &&  // two and more coordinates between positions of the kernel
                     std::any_of(problem.dims.begin(), problem.dims.end(),
                                 [](const ConvDim& d) { return d.stride > d.reach() + 1; });
  const bool wide_kernel = channels < 32 && column.kernel > 1 && column.kernel * channels >= 64;
  return thin_volume(problem, sizes) || skips || one_column || padded_steps || reads_past_end(problem) ||
         (wide_kernel && has_amx());
}

// Input gradients are wrong for thin volumes, and for volumes with strides of three and more.
bool input_gradient_wrong_in_half(const ConvProblem& problem) {
  return thin_volume(problem, values(problem, &ConvDim::big)) ||
         (problem.dims.size() == 3 && std::any_of(problem.dims.begin(), problem.dims.end(),
                                                  [](const ConvDim& d) { return d.stride > 2; }));
}

// Weight gradients are wrong for thin volumes, and where the image has fewer columns than the stride.
bool weight_gradient_wrong_in_half(const ConvProblem& problem) {
  return problem.dims.back().big < problem.dims.back().stride ||
         thin_volume(problem, values(problem, &ConvDim::big));
}

// Contiguous, with the strides of a contiguous tensor: with one channel, other strides could also mean
// channels_last, and oneDNN takes them so.
Tensor plainly_contiguous(const Tensor& tensor) {
  return tensor.contiguous().view({-1}).view(tensor.sizes());
}

// oneDNN prepares a primitive for omp_get_max_threads() threads and expects that many when it runs. Within a
// parallel region only one runs, so that number is set to one. The setting belongs to the region and ends
// with it.
struct SerialWithin {
  SerialWithin() { omp_set_num_threads(1); }
};

class CpuEngine : public ConvEngine {
 public:
  int64_t stock_bytes(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                      at::MemoryFormat format, int64_t enough) const override {
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t big = c10::multiply_integers(problem.big_sizes(problem.batch)) * element;
    const int64_t small = c10::multiply_integers(problem.small_sizes(problem.batch)) * element;
    const int64_t columns =
        small / problem.small_channels * (problem.big_channels / problem.groups) * problem.kernel_volume();
    // The question takes a microsecond or two, and most calls are far too small for the answer to matter.
    if (big + small + columns <= enough) return big + small + columns;
    if (!served_by_onednn(problem, pass, dtype, Part::kWhole)) return columns;
    const bool as_it_is =
        pass != ConvPass::kWeight || weight_gradient_way(problem, dtype) == WeightGradient::kChannelsLast;
    if (channels_last(format) && as_it_is) return 0;
    return big + small;
  }

  TileStyle tile_style(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype) const override {
    TileStyle style;
    // Sums over several tiles would be rounded to half precision once per tile, so they are made in float32.
    const bool sums = pass == ConvPass::kWeight || problem.gather.has_value();
    style.dtype = is_half(dtype) && (sums || !multiplies_half(dtype)) ? at::kFloat : dtype;
    const auto way =
        pass == ConvPass::kWeight ? weight_gradient_way(problem, style.dtype) : WeightGradient::kStock;
    const bool products = way == WeightGradient::kProducts;
    const bool direct = way == WeightGradient::kChannelsLast;
    const bool onednn = pass == ConvPass::kSmall
                            ? computed_by_onednn(style.dtype)
                            : !products && served_by_onednn(problem, pass, style.dtype, Part::kTile);
    const bool plain = pass == ConvPass::kSmall && reads_past_end(problem);
    if (products || direct || (onednn && pass != ConvPass::kWeight && !plain)) {
      style.format =
          problem.dims.size() == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    }
    const auto element = static_cast<int64_t>(c10::elementSize(style.dtype));
    style.cost.big_bytes = problem.big_channels * element;
    style.cost.small_bytes = problem.small_channels * element;
    // Each call converts the weight to its own layout. Weight gradients have one sum per thread, and stock's
    // one partial result per call.
    style.cost.fixed_bytes = c10::multiply_integers(problem.weight_sizes()) * element *
                             (pass == ConvPass::kWeight && !products ? 3 : 1);
    if (!onednn && !products) {
      style.cost.small_bytes += problem.big_channels / problem.groups * problem.kernel_volume() * element;
    } else if (pass == ConvPass::kWeight && !products && !direct) {
      // oneDNN reorders both tiles.
      style.cost.big_bytes *= 2;
      style.cost.small_bytes *= 2;
    }
    style.cost.preferred_bytes = kPreferredBytes;
    style.cost.copies =
        pass != ConvPass::kWeight;  // weight gradients multiply whole rows, which are longer uncut
    style.max_padding =
        products || (is_half(style.dtype) && sees_only_padding(problem)) ? -1 : widest_fast_padding(problem);
    // Stock's own choice of algorithm depends on the number of threads, so a tile that stock computes gets
    // all of them.
    const bool without_stock = products || direct || (onednn && pass == ConvPass::kSmall);
    style.cost.threads = without_stock && !at::in_parallel_region() ? at::get_num_threads() : 1;
    return style;
  }

  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& range) const override {
    if (count == 1) return range(0, 1);
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      const SerialWithin serial;
      range(begin, end);
    });
  }

  Tensor convolve(const Tensor& tile, const Tensor& weight, const std::optional<Tensor>& bias,
                  const ConvProblem& problem, at::IntArrayRef padding) const override {
    if (!computed_by_onednn(tile.scalar_type()))
      return ConvEngine::convolve(tile, weight, bias, problem, padding);
    if (is_half(tile.scalar_type()) && wrong_in_half(problem, tile.sizes().slice(2), padding)) {
      const auto wide = bias ? std::optional<Tensor>(bias->to(at::kFloat)) : std::nullopt;
      return convolve(tile.to(at::kFloat), weight.to(at::kFloat), wide, problem, padding)
          .to(tile.scalar_type());
    }
    const bool plain = reads_past_end(problem) || sees_only_padding(problem);
    return at::mkldnn_convolution(
        plain ? plainly_contiguous(tile) : tile, plain ? plainly_contiguous(weight) : weight, bias, padding,
        values(problem, &ConvDim::stride), values(problem, &ConvDim::dilation), problem.groups);
  }

  void correlate(const Tensor& big, const Tensor& small, const ConvProblem& problem, at::IntArrayRef padding,
                 const Tensor& sum) const override {
    if (weight_gradient_way(problem, big.scalar_type()) == WeightGradient::kProducts)
      return add_weight_gradient(big, small, problem, sum);
    ConvEngine::correlate(big, small, problem, padding, sum);
  }

  bool prefers_convolution() const override { return true; }

  bool stock_fails(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                   at::MemoryFormat format) const override {
    const bool half = is_half(dtype) && multiplies_half(dtype);
    if (pass == ConvPass::kWeight)
      return (channels_last(format) && writes_past_end(problem)) ||
             (half && weight_gradient_wrong_in_half(problem));
    if (pass == ConvPass::kBig) return half && input_gradient_wrong_in_half(problem);
    if (!computed_by_onednn(dtype)) return false;
    const auto big = values(problem, &ConvDim::big);
    return (half && (sees_only_padding(problem) ||
                     wrong_in_half(problem, big, values(problem, &ConvDim::pad_before)))) ||
           (channels_last(format) && (reads_past_end(problem) || sees_only_padding(problem)));
  }

  bool stock_is_slow(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype) const override {
    if (is_half(dtype) && !multiplies_half(dtype)) {
      // Float32 tiles are up to several hundred times faster, where there is enough work to pay for the
      // conversion.
      const int64_t products = c10::multiply_integers(problem.small_sizes(problem.batch)) *
                               problem.kernel_volume() * (problem.big_channels / problem.groups);
      const int64_t matrix =
          problem.big_channels / problem.groups * (problem.small_channels / problem.groups);
      return products >= kManyProducts && (pass != ConvPass::kWeight || matrix >= kLargeMatrix);
    }
    if (pass == ConvPass::kWeight && dtype == at::kFloat) {
      // oneDNN's fast kernels do not compute weight gradients of tensors whose bytes do not fit 31 bits.
      const int64_t most = std::max(c10::multiply_integers(problem.big_sizes(problem.batch)),
                                    c10::multiply_integers(problem.small_sizes(problem.batch)));
      return most * static_cast<int64_t>(sizeof(float)) > std::numeric_limits<int32_t>::max();
    }
    return dtype == at::kFloat && pass == ConvPass::kSmall && problem.groups == 1 &&
           problem.dims.back().pad_before > widest_fast_padding(problem);
  }

  Tensor load(const Tensor& source, const Region& region, PaddingMode mode,
              const TileStyle& style) const override {
    if (backend() == Backend::kAten) return ConvEngine::load(source, region, mode, style);
    Tensor tile = at::empty(region.sizes(source.size(1)),
                            source.options().dtype(style.dtype).memory_format(style.format));
    move_tile(TileMove::kLoad, source, region, mode, tile);
    return tile;
  }

  void store(const Tensor& tile, const Region& region, const Tensor& target) const override {
    if (backend() == Backend::kAten) return ConvEngine::store(tile, region, target);
    move_tile(TileMove::kStore, target, region, PaddingMode::kZeros, tile);
  }
};

struct CpuRoom {
  static const CpuEngine& engine() {
    static const CpuEngine engine;
    return engine;
  }
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    return conv_forward(engine(), spec, input, weight, bias);
  }
  static ConvGrads backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
    return conv_backward(engine(), spec, args);
  }
  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    return conv_fused(engine(), spec, input, weight, bias, parts);
  }
};

Tensor conv3d_onednn(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                     int64_t groups) {
  // A single tap has no distance to another: with one oneDNN may crash (sees_only_padding).
  std::vector<int64_t> steps = dilation.vec();
  for (size_t d = 0; d < steps.size(); ++d) steps[d] = weight.size(d + 2) == 1 ? 1 : steps[d];
  const Tensor y =
      at::globalContext().userEnabledMkldnn()
          ? at::mkldnn_convolution(input, weight, bias, padding, stride, steps, groups)
          : at::convolution(input, weight, bias, stride, padding, dilation, false, {0, 0, 0}, groups);
  return y.contiguous(output_format(input, weight));
}

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_conv3d_onednn", &conv3d_onednn);
  register_conv<CpuRoom>(m);
}

const RegisterEngine registered("cpu", CpuRoom::engine());

}  // namespace

}  // namespace patchconv
