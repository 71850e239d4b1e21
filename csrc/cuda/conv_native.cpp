#include "cuda/conv_native.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "core/conv_rules.h"
#include "core/settings.h"
#include "cuda/kernel_call.h"
#include "cuda/kernels/conv.h"
#include "ops/optional.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;
using c10::irange;
using kernels::ConvCall;
using kernels::ConvTensor;
using kernels::Type;

namespace {

// Kernels that write a grid, then those of the weight's gradient.
enum class Kernel { kPlain, kGather, kTiles, kStem, kDepthwise, kWeight, kDepthwiseWeight };
constexpr const char* kNames[] = {"plain", "plain", "tiles", "stem", "depthwise", "weight", "depthwise"};

Type type_of(at::ScalarType dtype) {
  return dtype == at::kHalf       ? Type::kHalf
         : dtype == at::kBFloat16 ? Type::kBFloat16
         : dtype == at::kFloat    ? Type::kFloat
                                  : Type::kDouble;
}

// Whether float32 must be computed as float32, and not as TF32.
bool strict() { return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

// The problem in three dimensions: those that it lacks come first, with size one.
struct Dims {
  explicit Dims(const ConvProblem& problem) : lacking(3 - problem.dims.size()) {
    for (size_t d = 0; d < 3; ++d) {
      at[d] = d < lacking ? ConvDim{/*big=*/1, /*small=*/1} : problem.dims[d - lacking];
    }
  }
  std::array<int64_t, 3> kernel() const { return {at[0].kernel, at[1].kernel, at[2].kernel}; }

  ConvDim at[3];
  size_t lacking;
};

ConvTensor strided(const Tensor& tensor, const Tensor& bits = Tensor()) {
  // Where a size is 1 the stride does not matter; 0 counts as aligned.
  const auto stride = [&](int64_t d) { return tensor.size(d) == 1 ? 0 : tensor.stride(d); };
  ConvTensor result{tensor.const_data_ptr(), stride(0), tensor.stride(1)};
  const int64_t spatial = tensor.dim() - 2;
  for (const auto d : irange(spatial)) result.place[3 - spatial + d] = stride(2 + d);
  if (bits.defined()) result.bits = bits.const_data_ptr<uint8_t>();
  return result;
}

// Whether the same elements are at the same offsets.
bool laid_out_alike(const Tensor& a, const Tensor& b) {
  bool alike = true;
  for (const auto d : irange(a.dim())) alike = alike && (a.size(d) == 1 || a.stride(d) == b.stride(d));
  return alike;
}

kernels::ConvWeight strided_weight(const ConvProblem& problem, const Tensor& weight, bool to_big) {
  const auto stride = [&](int64_t d) { return weight.size(d) == 1 ? 0 : weight.stride(d); };
  const int64_t group = weight.stride(0) * (problem.small_channels / problem.groups);
  kernels::ConvWeight result{weight.const_data_ptr(), group, weight.stride(to_big ? 1 : 0),
                             weight.stride(to_big ? 0 : 1)};
  const int64_t spatial = weight.dim() - 2;
  for (const auto d : irange(spatial)) result.tap[3 - spatial + d] = stride(2 + d);
  return result;
}

// Everything that follows from the sizes; the lines are those of the first residue.
ConvCall call_of(const ConvProblem& problem, ConvPass pass) {
  const bool to_big = pass == ConvPass::kBig;
  ConvCall call;
  call.mode = to_big ? PaddingMode::kZeros : problem.mode;
  call.images = problem.batch;
  call.groups = static_cast<int>(problem.groups);
  call.sources = static_cast<int>((to_big ? problem.small_channels : problem.big_channels) / problem.groups);
  call.outputs = static_cast<int>((to_big ? problem.big_channels : problem.small_channels) / problem.groups);
  const Dims dims(problem);
  for (int d = 0; d < 3; ++d) {
    call.lines[d] = to_big ? big_lines(dims.at[d]).front() : small_line(dims.at[d]);
  }
  return call;
}

// Calls use(lines) for each combination of the lines that a pass consists of.
template <typename Use>
void each_lines(const ConvProblem& problem, ConvPass pass, Use use) {
  const Dims dims(problem);
  std::vector<ConvLine> lines[3];
  for (int d = 0; d < 3; ++d) {
    lines[d] = pass == ConvPass::kBig ? big_lines(dims.at[d]) : std::vector<ConvLine>{small_line(dims.at[d])};
  }
  for (const ConvLine& z : lines[0]) {
    for (const ConvLine& y : lines[1]) {
      for (const ConvLine& x : lines[2]) use({z, y, x});
    }
  }
}

// Calls use(ranges) for each piece of the grid that is written.
template <typename Use>
int64_t each_piece(const ConvProblem& problem, ConvPass pass, Use use) {
  const Dims dims(problem);
  int64_t sizes[3], pieces[3] = {1, 1, 1}, count = 1;
  for (size_t d = 0; d < 3; ++d) {
    sizes[d] = pass == ConvPass::kBig ? dims.at[d].big : dims.at[d].small;
    if (d >= dims.lacking && !problem.splits.empty()) pieces[d] = problem.splits[d - dims.lacking];
    pieces[d] = std::clamp<int64_t>(pieces[d], 1, sizes[d]);
    count *= pieces[d];
  }
  for (const auto i : irange(count)) {
    const int64_t at[3] = {i / pieces[2] / pieces[1], i / pieces[2] % pieces[1], i % pieces[2]};
    std::array<Range, 3> ranges;
    for (int d = 0; d < 3; ++d) ranges[d] = piece_of(sizes[d], pieces[d], at[d]);
    use(ranges);
  }
  return count;
}

kernels::ConvTilePlan tile_plan(Type type, const ConvLine (&lines)[3], int outputs) {
  return kernels::plan_conv_tiles(type, strict(), lines, outputs, device_limits().shared_bytes);
}

// Elements of a first layer's packed weight: the largest number over all lines.
int64_t stem_elements(const ConvProblem& problem, ConvPass pass, Type type) {
  int64_t most = 0;
  ConvCall call = call_of(problem, pass);
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    std::copy(lines, lines + 3, call.lines);
    most = std::max(most, kernels::conv_stem_packed_elements(type, call));
  });
  return most;
}

// Bytes that the parts of a weight gradient may take; a single part may take more.
int64_t parts_limit() { return std::min<int64_t>(workspace_limit(), int64_t{32} << 20); }

kernels::ConvWeightPlan weight_plan(Type type, const ConvCall& call) {
  return kernels::plan_conv_weight(type, strict(), call, device_limits().multiprocessors, parts_limit());
}

Kernel weight_kernel(const ConvProblem& problem, Type type) {
  const ConvCall call = call_of(problem, ConvPass::kWeight);
  if (type == Type::kDouble) return Kernel::kPlain;
  if (call.sources == 1 && call.groups > 1 &&
      kernels::conv_depthwise_weight_workspace(type, call, parts_limit()) >= 0) {
    return Kernel::kDepthwiseWeight;
  }
  return weight_plan(type, call).parts > 0 ? Kernel::kWeight : Kernel::kPlain;
}

// The big grid takes one launch per residue of the strides. If there are more than this, it takes one of the
// plain kernel.
constexpr int64_t kMostLaunches = 16;

int64_t residues(const ConvProblem& problem) {
  int64_t count = 1;
  for (const ConvDim& dim : problem.dims) count *= dim.stride;
  return count;
}

// Depends on sizes alone: the same kernel whatever the strides, splits and addresses.
Kernel kernel_for(const ConvProblem& problem, ConvPass pass, Type type) {
  if (pass == ConvPass::kWeight) return weight_kernel(problem, type);
  if (pass == ConvPass::kBig && (problem.mode != PaddingMode::kZeros || residues(problem) > kMostLaunches)) {
    return Kernel::kGather;
  }
  if (type == Type::kDouble) return Kernel::kPlain;
  ConvCall call = call_of(problem, pass);
  const int shared = device_limits().shared_bytes;
  const auto all = [&](auto serves) {
    bool yes = true;
    each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
      std::copy(lines, lines + 3, call.lines);
      yes = yes && serves();
    });
    return yes;
  };
  if (call.sources == 1 && call.groups > 1 &&
      all([&] { return kernels::conv_depthwise_serves(type, call, shared); })) {
    return Kernel::kDepthwise;
  }
  if (call.groups == 1 && call.sources <= 4 &&
      all([&] { return kernels::conv_stem_serves(type, call, shared); })) {
    return Kernel::kStem;
  }
  const bool fits = kernels::conv_tiles_grid_fits(type, strict(), call) &&
                    all([&] { return tile_plan(type, call.lines, call.outputs).buffers > 0; });
  return fits ? Kernel::kTiles : Kernel::kPlain;
}

// Whether this architecture's rules say that this project's kernel is faster.
bool measured_faster(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                     at::MemoryFormat format) {
  const int arch = device_limits().arch;
  if (dtype == at::kDouble || !has_conv_rules(arch)) return false;
  ConvQuery query;
  query.pass = pass == ConvPass::kSmall ? "fprop" : pass == ConvPass::kBig ? "dgrad" : "wgrad";
  query.dtype = dtype == at::kHalf       ? "float16"
                : dtype == at::kBFloat16 ? "bfloat16"
                : strict()               ? "float32"
                                         : "tf32";
  query.channels_last = format != at::MemoryFormat::Contiguous;
  query.groups = problem.groups;
  query.sources = problem.big_channels / problem.groups;
  query.outputs = problem.small_channels / problem.groups;
  query.taps = problem.kernel_volume();
  query.places = problem.batch;
  for (const ConvDim& dim : problem.dims) {
    query.stride = std::max(query.stride, dim.stride);
    query.places *= dim.small;
  }
  return prefers_native_kernel(arch, query);
}

void record(const ConvProblem& problem, ConvPass pass, Kernel kernel, int64_t pieces) {
  TilePlan plan;
  plan.tiled = !problem.unsplit();
  plan.batch_step = problem.batch;
  plan.pieces.assign(problem.splits.begin(), problem.splits.end());
  plan.pieces.resize(problem.dims.size(), 1);
  PathRecorder recorder(problem, pass, plan, kNames[static_cast<int>(kernel)]);
  for (int64_t i = 0; i < pieces; ++i) recorder.tile(true);
  recorder.finish();
}

}  // namespace

NativeKernel choose_native_kernel(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                                  at::MemoryFormat format) {
  const bool asked = backend() == Backend::kNative;
  if (!asked && (backend() == Backend::kAten || !measured_faster(problem, pass, dtype, format))) return {};
  const Type type = type_of(dtype);
  const Kernel kernel = kernel_for(problem, pass, type);
  if (!asked && (kernel == Kernel::kPlain || kernel == Kernel::kGather)) return {};
  NativeKernel result{kNames[static_cast<int>(kernel)]};
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  if (kernel == Kernel::kTiles) {
    result.workspace =
        element * kernels::conv_packed_elements(type, call_of(problem, pass), Dims(problem).kernel());
  } else if (kernel == Kernel::kStem) {
    result.workspace = element * stem_elements(problem, pass, type);
  } else if (kernel == Kernel::kWeight) {
    result.workspace = 4 * weight_plan(type, call_of(problem, ConvPass::kWeight)).workspace;
  } else if (kernel == Kernel::kDepthwiseWeight) {
    result.workspace = 4 * kernels::conv_depthwise_weight_workspace(type, call_of(problem, ConvPass::kWeight),
                                                                    parts_limit());
  }
  return result;
}

bool native_kernel_writes_bits(const ConvProblem& problem, ConvPass pass, const Tensor& target) {
  const Kernel kernel = kernel_for(problem, pass, type_of(target.scalar_type()));
  const bool depthwise = kernel == Kernel::kDepthwise;
  if (!depthwise && kernel != Kernel::kStem && kernel != Kernel::kTiles) return false;
  if (!target.is_non_overlapping_and_dense()) return false;
  bool all = true;
  ConvCall call = call_of(problem, pass);
  call.target = strided(target);
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    each_piece(problem, pass, [&](const std::array<Range, 3>& ranges) {
      for (int d = 0; d < 3; ++d) call.lines[d] = lines[d].cut(ranges[d]);
      all = all && kernels::conv_writes_bits(call, depthwise);
    });
  });
  return all;
}

void run_native_grid(const ConvProblem& problem, ConvPass pass, const Tensor& source, const Tensor& bits,
                     const Tensor& weight, const Epilogue& epilogue, const Tensor& target) {
  const auto dense = [&](const std::optional<Tensor>& vector, at::ScalarType dtype) {
    return given(vector) ? vector->to(dtype).contiguous() : Tensor();
  };
  const Tensor bias = dense(epilogue.bias, target.scalar_type());
  const Tensor scale =
      dense(epilogue.scale, type_of(target.scalar_type()) == Type::kDouble ? at::kDouble : at::kFloat);
  Tensor residual;
  if (epilogue.residual.has_value() && epilogue.residual->defined()) {
    residual = *epilogue.residual;
    if (!laid_out_alike(residual, target) || residual.scalar_type() != target.scalar_type()) {
      residual = at::empty_like(target).copy_(residual);
    }
  }
  const auto data = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };

  const Type type = type_of(source.scalar_type());
  const Kernel kernel = kernel_for(problem, pass, type);
  const kernels::Stream stream = current_stream(source);
  ConvCall call = call_of(problem, pass);
  call.source = strided(source, bits);
  call.weight = strided_weight(problem, weight, pass == ConvPass::kBig);
  call.target = strided(target);
  call.target.data = target.mutable_data_ptr();
  call.epilogue = {data(scale), data(bias), data(residual), epilogue.relu,
                   epilogue.bits.defined() ? epilogue.bits.mutable_data_ptr<uint8_t>() : nullptr};
  const Dims dims(problem);
  if (kernel == Kernel::kGather) {
    kernels::launch_conv_plain_gather(type, dims.at, problem.mode, call, stream);
    return record(problem, pass, kernel, 1);
  }
  Tensor packed;
  if (kernel == Kernel::kTiles && !kernels::conv_reads_weight(type, strict(), call)) {
    packed = at::empty({kernels::conv_packed_elements(type, call, dims.kernel())}, weight.options());
    call.weight =
        kernels::launch_conv_pack(type, strict(), call, dims.kernel(), packed.mutable_data_ptr(), stream);
  } else if (kernel == Kernel::kStem) {
    packed = at::empty({stem_elements(problem, pass, type)}, weight.options());
  }
  int64_t pieces = 0;
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    // Made for whole lines, so that pieces are summed in the same order as the whole.
    const auto plan =
        kernel == Kernel::kTiles ? tile_plan(type, lines, call.outputs) : kernels::ConvTilePlan();
    pieces = each_piece(problem, pass, [&](const std::array<Range, 3>& ranges) {
      for (int d = 0; d < 3; ++d) call.lines[d] = lines[d].cut(ranges[d]);
      if (kernel == Kernel::kTiles) {
        kernels::launch_conv_tiles(type, strict(), plan, call, stream);
      } else if (kernel == Kernel::kStem) {
        kernels::launch_conv_stem(type, strict(), call, packed.mutable_data_ptr(), stream);
      } else if (kernel == Kernel::kDepthwise) {
        kernels::launch_conv_depthwise(type, call, stream);
      } else {
        kernels::launch_conv_plain(type, call, stream);
      }
    });
  });
  record(problem, pass, kernel, pieces);
}

Tensor run_native_weight(const ConvProblem& problem, const Tensor& big, const Tensor& small,
                         const Tensor& bits) {
  Tensor weight = at::empty(problem.weight_sizes(), big.options());
  const Type type = type_of(big.scalar_type());
  const kernels::Stream stream = current_stream(big);
  ConvCall call = call_of(problem, ConvPass::kWeight);
  // The bits belong to the gradient of the output: the small grid, or the big one of a transposed
  // convolution.
  call.source = strided(big, problem.transposed ? bits : Tensor());
  call.target = strided(small, problem.transposed ? Tensor() : bits);
  call.weight = strided_weight(problem, weight, false);
  call.weight.data = weight.mutable_data_ptr();
  const auto workspace = [&](int64_t floats) { return at::empty({floats}, big.options().dtype(at::kFloat)); };
  const Kernel kernel = weight_kernel(problem, type);
  if (kernel == Kernel::kWeight) {
    const auto plan = weight_plan(type, call);
    const Tensor parts = workspace(plan.workspace);
    kernels::launch_conv_weight(type, strict(), plan, call, parts.mutable_data_ptr<float>(), stream);
  } else if (kernel == Kernel::kDepthwiseWeight) {
    const Tensor parts = workspace(kernels::conv_depthwise_weight_workspace(type, call, parts_limit()));
    kernels::launch_conv_depthwise_weight(type, call, parts_limit(), parts.mutable_data_ptr<float>(), stream);
  } else {
    kernels::launch_conv_plain_weight(type, call, stream);
  }
  record(problem, ConvPass::kWeight, kernel, 1);
  return weight;
}

Tensor run_native_channel_sums(const Tensor& source, const Tensor& bits) {
  Tensor sums = at::empty({source.size(1)}, source.options());
  const Type type = type_of(source.scalar_type());
  kernels::ConvChannelSums call;
  call.images = source.size(0);
  call.channels = static_cast<int>(source.size(1));
  const int64_t spatial = source.dim() - 2;
  for (const auto d : irange(spatial)) call.sizes[3 - spatial + d] = source.size(2 + d);
  call.source = strided(source, bits);
  call.target = sums.mutable_data_ptr();
  const Tensor parts =
      at::empty({kernels::conv_channel_sums_workspace(type, call)}, source.options().dtype(at::kFloat));
  kernels::launch_conv_channel_sums(type, call, parts.mutable_data_ptr<float>(), current_stream(source));
  return sums;
}

}  // namespace patchconv
