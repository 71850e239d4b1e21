#include "ops/conv_checks.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "ops/activation.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

constexpr const char* kNames[2][3] = {{"conv1d", "conv2d", "conv3d"},
                                      {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}};
constexpr const char* kInputShape[3] = {"(C, L) or (N, C, L)", "(C, H, W) or (N, C, H, W)",
                                        "(C, D, H, W) or (N, C, D, H, W)"};
constexpr const char* kKernelShape[3] = {"S)", "R, S)", "T, R, S)"};

// One or `dims` entries, each at least `least`.
PerDim<int64_t> expand(const char* op, size_t dims, const char* argument, at::IntArrayRef list,
                       int64_t least) {
  TORCH_CHECK_VALUE(list.size() == 1 || list.size() == dims, op, ": expected ", argument, " to have 1 or ",
                    dims, " entries, got ", list.size());
  PerDim<int64_t> result;
  for (const auto d : irange(dims)) {
    result.push_back(list[list.size() == 1 ? 0 : d]);
    TORCH_CHECK_VALUE(result[d] >= least, op, ": expected every entry of ", argument, " to be at least ",
                      least, ", got ", list);
  }
  return result;
}

// `pairs`: whether the list may have (before, after) of each dimension.
void set_padding(ConvSpec& spec, at::IntArrayRef list, bool pairs) {
  const size_t dims = spec.dims.size();
  const bool paired = pairs && list.size() == 2 * dims;
  TORCH_CHECK_VALUE(paired || list.size() == 1 || list.size() == dims, spec.op,
                    ": expected padding to have 1", pairs ? ", " : " or ", dims,
                    pairs ? c10::str(" or ", 2 * dims) : "", " entries, got ", list.size());
  for (const auto d : irange(dims)) {
    ConvDim& dim = spec.dims[d];
    dim.pad_before = list.size() == 1 ? list[0] : list[paired ? 2 * d : d];
    dim.pad_after = paired ? list[2 * d + 1] : dim.pad_before;
    TORCH_CHECK_VALUE(dim.pad_before >= 0 && dim.pad_after >= 0, spec.op,
                      ": expected every entry of padding to be at least 0, got ", list);
  }
}

// What both kinds of convolution have. `splits`: no value, or an empty list, for automatic.
ConvSpec basic_spec(const char* op, size_t dims, at::IntArrayRef stride, at::IntArrayRef padding,
                    at::IntArrayRef dilation, int64_t groups, at::OptionalIntArrayRef splits, bool pairs) {
  ConvSpec spec;
  spec.op = op;
  spec.groups = groups;
  const auto strides = expand(op, dims, "stride", stride, 1);
  const auto dilations = expand(op, dims, "dilation", dilation, 1);
  for (const auto d : irange(dims)) {
    ConvDim dim;
    dim.stride = strides[d];
    dim.dilation = dilations[d];
    spec.dims.push_back(dim);
  }
  set_padding(spec, padding, pairs);
  TORCH_CHECK_VALUE(groups >= 1, op, ": expected groups to be at least 1, got ", groups);
  if (splits.has_value()) {
    spec.splits = expand(op, dims, "splits", *splits, 1);
    if (splits->size() == 1) std::fill(spec.splits.begin() + 1, spec.splits.end(), 1);
  }
  return spec;
}

void set_padding_mode(ConvSpec& spec, std::string_view name) {
  TORCH_CHECK_VALUE(parse_padding_mode(name, &spec.mode), spec.op,
                    ": expected padding_mode to be 'zeros', 'reflect', 'replicate' or 'circular', got '",
                    name, "'");
  // Without padding there is nothing for a mode to fill.
  const auto none = [](const ConvDim& dim) { return dim.pad_before == 0 && dim.pad_after == 0; };
  if (std::all_of(spec.dims.begin(), spec.dims.end(), none)) spec.mode = PaddingMode::kZeros;
}

void set_output_padding(ConvSpec& spec, at::IntArrayRef list, at::IntArrayRef stride,
                        at::IntArrayRef dilation) {
  spec.transposed = true;
  spec.output_padding = expand(spec.op, spec.dims.size(), "output_padding", list, 0);
  for (const auto d : irange(spec.dims.size())) {
    const ConvDim& dim = spec.dims[d];
    TORCH_CHECK_VALUE(spec.output_padding[d] < std::max(dim.stride, dim.dilation), spec.op,
                      ": expected output_padding to be smaller than stride or dilation, got output_padding ",
                      list, ", stride ", stride, ", dilation ", dilation);
  }
}

void check_tensor(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": expected ", argument,
                   " to be a strided tensor, got ", tensor.layout());
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op,
      ": expected ", argument, " to have dtype float64, float32, float16 or bfloat16, got ", dtype);
}

void check_same(const char* op, const char* argument, const Tensor& tensor, const char* other_name,
                const Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), op, ": expected ", argument,
                   " to have the dtype of ", other_name, " (", other.scalar_type(), "), got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == other.device(), op, ": expected ", argument,
                    " to be on the device of ", other_name, " (", other.device(), "), got ", tensor.device());
}

}  // namespace

ConvSpec conv_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, std::string_view padding_mode, at::OptionalIntArrayRef splits,
                   const char* op) {
  const char* const name = op != nullptr ? op : kNames[0][dims - 1];
  ConvSpec spec = basic_spec(name, dims, stride, padding, dilation, groups, splits, true);
  set_padding_mode(spec, padding_mode);
  return spec;
}

ConvSpec transposed_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding,
                         at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef dilation,
                         at::OptionalIntArrayRef splits) {
  ConvSpec spec = basic_spec(kNames[1][dims - 1], dims, stride, padding, dilation, groups, splits, false);
  set_output_padding(spec, output_padding, stride, dilation);
  return spec;
}

ConvLists::ConvLists(const ConvSpec& spec)
    : stride(stride_of.data(), spec.dims.size()),
      padding(padding_of.data(), 2 * spec.dims.size()),
      dilation(dilation_of.data(), spec.dims.size()),
      output_padding(spec.output_padding.begin(), spec.output_padding.size()),
      splits(spec.splits.begin(), spec.splits.size()) {
  for (const auto d : irange(spec.dims.size())) {
    stride_of[d] = spec.dims[d].stride;
    dilation_of[d] = spec.dims[d].dilation;
    padding_of[2 * d] = spec.dims[d].pad_before;
    padding_of[2 * d + 1] = spec.dims[d].pad_after;
  }
}

ConvSpec spec_of_lists(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                       at::IntArrayRef output_padding, at::IntArrayRef splits, int64_t groups,
                       bool transposed, std::string_view padding_mode) {
  const size_t dims = stride.size();
  TORCH_CHECK_VALUE(dims >= 1 && dims <= 3, "_convolution: expected stride to have 1 to 3 entries, got ",
                    dims);
  const auto pieces = splits.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(splits);
  ConvSpec spec =
      basic_spec(kNames[transposed][dims - 1], dims, stride, padding, dilation, groups, pieces, true);
  set_padding_mode(spec, padding_mode);
  if (!transposed) {
    TORCH_CHECK_VALUE(output_padding.empty(), spec.op, ": expected no output_padding, got ", output_padding);
    return spec;
  }
  set_output_padding(spec, output_padding, stride, dilation);
  TORCH_CHECK_VALUE(spec.mode == PaddingMode::kZeros, spec.op, ": expected padding_mode to be 'zeros', got '",
                    padding_mode, "'");
  for (const ConvDim& dim : spec.dims) {
    TORCH_CHECK_VALUE(dim.pad_before == dim.pad_after, spec.op,
                      ": expected as much padding before as after, got ", padding);
  }
  return spec;
}

template <typename Int>
std::vector<Int> check_sizes(const ConvSpec& spec, c10::ArrayRef<Int> input, c10::ArrayRef<Int> weight) {
  const size_t dims = spec.dims.size();
  const char* op = spec.op;
  TORCH_CHECK_VALUE(weight.size() == dims + 2, op, ": expected weight to have ", dims + 2, " dimensions ",
                    spec.transposed ? "(C, K/groups, " : "(K, C/groups, ", kKernelShape[dims - 1], ", got ",
                    weight.size());
  TORCH_CHECK_VALUE(input.size() == dims + 1 || input.size() == dims + 2, op, ": expected input to have ",
                    dims + 1, " or ", dims + 2, " dimensions ", kInputShape[dims - 1], ", got ",
                    input.size());
  const bool batched = input.size() == dims + 2;
  const Int channels = input[batched ? 1 : 0];
  const Int expected = spec.transposed ? weight[0] : weight[1] * spec.groups;
  TORCH_CHECK_VALUE(weight[0] >= 1 && weight[1] >= 1 && weight[0] % spec.groups == 0, op,
                    ": expected dimension 0 of weight to be a positive multiple of groups (", spec.groups,
                    ") and dimension 1 to be positive, got weight of shape ", weight);
  TORCH_CHECK_VALUE(channels == expected, op, ": expected input to have ", expected,
                    " channels for weight of shape ", weight, " and groups ", spec.groups, ", got ",
                    channels);

  std::vector<Int> output;
  output.reserve(dims + 2);
  if (batched) output.push_back(input[0]);
  output.push_back(spec.transposed ? weight[1] * spec.groups : weight[0]);
  for (const auto d : irange(dims)) {
    const Int size = input[(batched ? 2 : 1) + d];
    TORCH_CHECK_VALUE(weight[2 + d] >= 1, op,
                      ": expected every kernel size to be at least 1, got weight of shape ", weight);
    const ConvDim& dim = spec.dims[d];
    const Int reach = (weight[2 + d] - 1) * dim.dilation + 1;
    const int64_t before = dim.pad_before;
    const int64_t after = dim.pad_after;
    if (spec.transposed) {
      const Int out = (size - 1) * dim.stride - before - after + reach + spec.output_padding[d];
      TORCH_CHECK_VALUE(size >= 1 && out >= 1, op, ": expected every output size to be at least 1, got ", out,
                        " in spatial dimension ", d, " for input of shape ", input);
      output.push_back(out);
      continue;
    }
    if (spec.mode == PaddingMode::kReflect) {
      TORCH_CHECK_VALUE(before < size && after < size, op,
                        ": expected reflect padding to be smaller than the input, got padding (", before,
                        ", ", after, ") for size ", size, " in spatial dimension ", d);
    } else if (spec.mode == PaddingMode::kCircular) {
      TORCH_CHECK_VALUE(before <= size && after <= size, op,
                        ": expected circular padding to be no larger than the input, got padding (", before,
                        ", ", after, ") for size ", size, " in spatial dimension ", d);
    } else if (spec.mode == PaddingMode::kReplicate) {
      TORCH_CHECK_VALUE(size >= 1, op,
                        ": expected an input that is not empty for replicate padding, got size ", size,
                        " in spatial dimension ", d);
    }
    const Int padded = size + (before + after);
    TORCH_CHECK_VALUE(padded >= reach, op,
                      ": expected the kernel to fit the padded input, got kernel extent ", reach,
                      " for padded size ", padded, " in spatial dimension ", d);
    output.push_back((padded - reach) / dim.stride + 1);
  }
  return output;
}

template std::vector<int64_t> check_sizes(const ConvSpec&, c10::ArrayRef<int64_t>, c10::ArrayRef<int64_t>);
template std::vector<c10::SymInt> check_sizes(const ConvSpec&, c10::ArrayRef<c10::SymInt>,
                                              c10::ArrayRef<c10::SymInt>);

void check_forward_tensors(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias) {
  check_tensor(spec.op, "input", input);
  check_tensor(spec.op, "weight", weight);
  check_same(spec.op, "weight", weight, "input", input);
  if (given(bias)) {
    const c10::SymInt channels = spec.transposed ? weight.sym_size(1) * spec.groups : weight.sym_size(0);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == channels, spec.op,
                      ": expected bias to have shape [", channels, "], got ", bias->sym_sizes());
    check_same(spec.op, "bias", *bias, "input", input);
  }
}

void check_fused(const FusedParts& parts, const Tensor& input, c10::SymIntArrayRef sizes) {
  if (given(parts.scale)) {
    const Tensor& scale = *parts.scale;
    const c10::SymInt& channels = sizes[sizes.size() - 3];
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.sym_size(0) == channels,
                      "conv2d_fused: expected scale to have K = ", channels, " elements, got shape ",
                      scale.sym_sizes());
    TORCH_CHECK_TYPE(scale.is_floating_point(),
                     "conv2d_fused: expected scale to be of a floating-point dtype, got ",
                     scale.scalar_type());
    TORCH_CHECK_VALUE(scale.device() == input.device(), "conv2d_fused: expected scale on ", input.device(),
                      ", got ", scale.device());
  }
  if (given(parts.residual)) {
    const Tensor& residual = *parts.residual;
    TORCH_CHECK_VALUE(residual.sym_sizes() == sizes,
                      "conv2d_fused: expected residual to have the result's shape ", sizes, ", got ",
                      residual.sym_sizes());
    TORCH_CHECK_TYPE(residual.scalar_type() == input.scalar_type(),
                     "conv2d_fused: expected residual to be of input's dtype ", input.scalar_type(), ", got ",
                     residual.scalar_type());
    TORCH_CHECK_VALUE(residual.device() == input.device(), "conv2d_fused: expected residual on ",
                      input.device(), ", got ", residual.device());
  }
}

void check_backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
  const char* const op = spec.op;
  const Tensor& grad_output = args.grad_output;
  const auto output_size = check_sizes<c10::SymInt>(spec, args.input_size, args.weight_size);
  check_tensor(op, "grad_output", grad_output);
  TORCH_CHECK_VALUE(grad_output.sym_sizes().equals(output_size), op, ": expected grad_output to have shape ",
                    c10::SymIntArrayRef(output_size), ", got ", grad_output.sym_sizes());
  auto check = [&](const char* argument, const OptionalTensor& tensor, c10::SymIntArrayRef size, bool needed,
                   const char* purpose) {
    TORCH_CHECK_VALUE(given(tensor) || !needed, op, ": expected ", argument, " for the gradient of ", purpose,
                      ", got None");
    if (!given(tensor)) return;
    check_same(op, argument, *tensor, "grad_output", grad_output);
    TORCH_CHECK_VALUE(tensor->sym_sizes().equals(size), op, ": expected ", argument, " to have shape ", size,
                      ", got ", tensor->sym_sizes());
  };
  check("input", args.input, args.input_size, args.output_mask[1], "weight");
  check("weight", args.weight, args.weight_size, args.output_mask[0], "input");
}

Tensor masked_grad(const ConvBackwardArgs& args) { return mask_backward(args.grad_output, args.bits, 1, 0); }

at::MemoryFormat output_format(const Tensor& input, const Tensor& weight) {
  for (const Tensor* tensor : {&input, &weight}) {
    if (!tensor->defined()) continue;
    const auto format = tensor->suggest_memory_format();
    if (format != at::MemoryFormat::Contiguous) return format;
  }
  return at::MemoryFormat::Contiguous;
}

at::MemoryFormat weight_format(const OptionalTensor& weight) {
  return given(weight) ? weight->suggest_memory_format() : at::MemoryFormat::Contiguous;
}

}  // namespace patchconv
