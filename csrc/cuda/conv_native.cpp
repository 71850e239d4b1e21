#include "cuda/conv_native.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "core/settings.h"
#include "cuda/kernel_call.h"
#include "cuda/kernels/conv.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;
using c10::irange;
using kernels::ConvProducts;
using kernels::ConvSums;
using kernels::ConvTensor;
using kernels::Type;

namespace {

enum class Kernel { kNone, kPlain, kGather, kTiles };
constexpr const char* kNames[] = {nullptr, "plain", "plain", "tiles"};

Type type_of(at::ScalarType dtype) {
  return dtype == at::kHalf       ? Type::kHalf
         : dtype == at::kBFloat16 ? Type::kBFloat16
         : dtype == at::kFloat    ? Type::kFloat
                                  : Type::kDouble;
}

// Whether float32 must be computed as such, and not in TF32.
bool strict() { return !at::globalContext().allowTF32CuDNN(); }

// The problem's dimensions, with those that it lacks in front.
struct Dims {
  explicit Dims(const ConvProblem& problem) : lacking(3 - problem.dims.size()) {
    for (size_t d = 0; d < 3; ++d) {
      at[d] = d < lacking ? ConvDim{/*big=*/1, /*small=*/1} : problem.dims[d - lacking];
    }
  }
  ConvDim at[3];
  size_t lacking;
};

ConvTensor strided(const Tensor& tensor, const Tensor& bits = Tensor()) {
  // Where a size is 1 any stride will do: zero is aligned.
  const auto stride = [&](int64_t d) { return tensor.size(d) == 1 ? 0 : tensor.stride(d); };
  ConvTensor result{tensor.const_data_ptr(), stride(0), tensor.stride(1)};
  const int64_t spatial = tensor.dim() - 2;
  for (const auto d : irange(spatial)) result.place[3 - spatial + d] = stride(2 + d);
  if (bits.defined()) result.bits = bits.const_data_ptr<uint8_t>();
  return result;
}

kernels::ConvWeight strided_weight(const ConvProblem& problem, const Tensor& weight, bool to_big) {
  const int64_t group = weight.stride(0) * (problem.small_channels / problem.groups);
  kernels::ConvWeight result{weight.const_data_ptr(), group, weight.stride(to_big ? 1 : 0),
                             weight.stride(to_big ? 0 : 1)};
  const int64_t spatial = weight.dim() - 2;
  for (const auto d : irange(spatial)) result.tap[3 - spatial + d] = weight.stride(2 + d);
  return result;
}

// Everything that the sizes say; lines are those of the first residue.
ConvSums sums_of(const ConvProblem& problem, ConvPass pass) {
  const bool to_big = pass == ConvPass::kBig;
  ConvSums call;
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
    lines[d] =
        pass == ConvPass::kBig ? big_lines(dims.at[d]) : std::vector<ConvLine>{small_line(dims.at[d])};
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

Kernel kernel_for(const ConvProblem& problem, ConvPass pass, Type type) {
  if (pass == ConvPass::kWeight) return Kernel::kPlain;
  if (pass == ConvPass::kBig && problem.mode != PaddingMode::kZeros) return Kernel::kGather;
  const ConvSums call = sums_of(problem, pass);
  bool fits = type != Type::kDouble && kernels::conv_tiles_grid_fits(type, strict(), call);
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    fits = fits && tile_plan(type, lines, call.outputs).buffers > 0;
  });
  return fits ? Kernel::kTiles : Kernel::kPlain;
}

void record(const ConvProblem& problem, ConvPass pass, Kernel kernel, int64_t pieces) {
  TilePlan plan;
  plan.tiled = !problem.unsplit();
  plan.batch_step = problem.batch;
  plan.pieces = problem.splits;
  plan.pieces.resize(problem.dims.size(), 1);
  PathRecorder recorder(problem, pass, plan, kNames[static_cast<int>(kernel)]);
  for (int64_t i = 0; i < pieces; ++i) recorder.tile(true);
  recorder.finish();
}

}  // namespace

OwnKernel choose_own_kernel(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                            at::MemoryFormat /*format*/) {
  if (backend() != Backend::kNative) return {};
  const Type type = type_of(dtype);
  const Kernel kernel = kernel_for(problem, pass, type);
  OwnKernel own{kNames[static_cast<int>(kernel)]};
  if (kernel == Kernel::kTiles) {
    const Dims dims(problem);
    own.workspace =
        kernels::conv_packed_elements(type, sums_of(problem, pass),
                                      {dims.at[0].kernel, dims.at[1].kernel, dims.at[2].kernel}) *
        static_cast<int64_t>(c10::elementSize(dtype));
  }
  return own;
}

bool own_kernel_writes_bits(const ConvProblem& problem, ConvPass pass, const Tensor& target) {
  if (kernel_for(problem, pass, type_of(target.scalar_type())) != Kernel::kTiles) return false;
  if (!target.is_non_overlapping_and_dense()) return false;
  bool all = true;
  ConvSums call = sums_of(problem, pass);
  call.target = strided(target);
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    each_piece(problem, pass, [&](const std::array<Range, 3>& ranges) {
      for (int d = 0; d < 3; ++d) call.lines[d] = lines[d].cut(ranges[d]);
      all = all && kernels::conv_writes_bits(call);
    });
  });
  return all;
}

void run_own_grid(const ConvProblem& problem, ConvPass pass, const Tensor& source, const Tensor& bits,
                  const Tensor& weight, const Epilogue& epilogue, const Tensor& target) {
  const auto dense = [&](const std::optional<Tensor>& vector, at::ScalarType dtype) {
    return vector.has_value() && vector->defined() ? vector->to(dtype).contiguous() : Tensor();
  };
  const Tensor bias = dense(epilogue.bias, target.scalar_type());
  const Tensor scale = dense(epilogue.scale, at::kFloat);
  Tensor residual;
  if (epilogue.residual.has_value() && epilogue.residual->defined()) {
    residual = *epilogue.residual;
    if (residual.strides() != target.strides() || residual.scalar_type() != target.scalar_type()) {
      residual = at::empty_like(target).copy_(residual);
    }
  }
  const auto data = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };

  const Type type = type_of(source.scalar_type());
  const Kernel kernel = kernel_for(problem, pass, type);
  const kernels::Stream stream = current_stream(source);
  ConvSums call = sums_of(problem, pass);
  call.source = strided(source, bits);
  call.weight = strided_weight(problem, weight, pass == ConvPass::kBig);
  call.target = strided(target);
  call.target.data = target.mutable_data_ptr();
  call.epilogue = {static_cast<const float*>(data(scale)), data(bias), data(residual), epilogue.relu,
                   epilogue.bits.defined() ? epilogue.bits.mutable_data_ptr<uint8_t>() : nullptr};
  const Dims dims(problem);
  if (kernel == Kernel::kGather) {
    const kernels::ConvGather gather{{dims.at[0], dims.at[1], dims.at[2]}, problem.mode, call};
    kernels::launch_conv_plain_gather(type, gather, stream);
    return record(problem, pass, kernel, 1);
  }
  Tensor packed;
  if (kernel == Kernel::kTiles && !kernels::conv_reads_weight(type, call)) {
    const int64_t sizes[3] = {dims.at[0].kernel, dims.at[1].kernel, dims.at[2].kernel};
    packed = at::empty({kernels::conv_packed_elements(type, call, sizes)}, weight.options());
    call.weight = kernels::launch_conv_pack(type, call, sizes, packed.mutable_data_ptr(), stream);
  }
  int64_t pieces = 0;
  each_lines(problem, pass, [&](const ConvLine(&lines)[3]) {
    // Of whole lines: pieces are summed in the order of the whole.
    const auto plan = kernel == Kernel::kTiles ? tile_plan(type, lines, call.outputs) : kernels::ConvTilePlan();
    pieces = each_piece(problem, pass, [&](const std::array<Range, 3>& ranges) {
      for (int d = 0; d < 3; ++d) call.lines[d] = lines[d].cut(ranges[d]);
      if (kernel == Kernel::kTiles) {
        kernels::launch_conv_tiles(type, strict(), plan, call, stream);
      } else {
        kernels::launch_conv_plain(type, call, stream);
      }
    });
  });
  record(problem, pass, kernel, pieces);
}

Tensor run_own_weight(const ConvProblem& problem, const Tensor& big, const Tensor& small,
                      const Tensor& bits) {
  Tensor weight = at::empty(problem.weight_sizes(), big.options());
  const Dims dims(problem);
  ConvProducts call;
  for (int d = 0; d < 3; ++d) call.lines[d] = small_line(dims.at[d]);
  call.mode = problem.mode;
  call.images = problem.batch;
  call.groups = static_cast<int>(problem.groups);
  call.sources = static_cast<int>(problem.big_channels / problem.groups);
  call.outputs = static_cast<int>(problem.small_channels / problem.groups);
  // What came back through the output: the small grid, of a transposed convolution the big one.
  call.big = strided(big, problem.transposed ? bits : Tensor());
  call.small = strided(small, problem.transposed ? Tensor() : bits);
  call.weight = strided_weight(problem, weight, false);
  call.weight.data = weight.mutable_data_ptr();
  kernels::launch_conv_plain_weight(type_of(big.scalar_type()), call, current_stream(big));
  record(problem, ConvPass::kWeight, Kernel::kPlain, 1);
  return weight;
}

}  // namespace patchconv
