#include "ops/conv_spec.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace patchconv {

using c10::irange;

namespace {

constexpr const char* kNames[2][3] = {{"conv1d", "conv2d", "conv3d"},
                                      {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}};
constexpr const char* kBackwardNames[2][3] = {
    {"conv1d_backward", "conv2d_backward", "conv3d_backward"},
    {"conv_transpose1d_backward", "conv_transpose2d_backward", "conv_transpose3d_backward"}};
constexpr const char* kInputShape[3] = {"(C, L) or (N, C, L)", "(C, H, W) or (N, C, H, W)",
                                        "(C, D, H, W) or (N, C, D, H, W)"};
constexpr const char* kKernelShape[3] = {"S)", "R, S)", "T, R, S)"};

constexpr std::array<int64_t, 3> kNone = {0, 0, 0};

// Copies a list of one or `dims` entries, each at least `least`.
void expand(const ConvParams& params, const char* argument, at::IntArrayRef list, int64_t least,
            std::array<int64_t, 3>* result) {
  const auto dims = static_cast<size_t>(params.dims);
  TORCH_CHECK_VALUE(list.size() == 1 || list.size() == dims, params.op, ": expected ", argument,
                    " to have 1 or ", dims, " entries, got ", list.size());
  for (const auto d : irange(dims)) {
    (*result)[d] = list[list.size() == 1 ? 0 : d];
    TORCH_CHECK_VALUE((*result)[d] >= least, params.op, ": expected every entry of ", argument,
                      " to be at least ", least, ", got ", list);
  }
}

void expand_padding(ConvParams* params, at::IntArrayRef list) {
  const auto dims = static_cast<size_t>(params->dims);
  const bool pairs = !params->transposed && dims * 2 == list.size();
  if (!pairs) {
    TORCH_CHECK_VALUE(list.size() == 1 || list.size() == dims, params->op, ": expected padding to have 1",
                      params->transposed ? " or " : ", ", dims,
                      params->transposed ? "" : c10::str(" or ", 2 * dims), " entries, got ", list.size());
  }
  for (const auto d : irange(dims)) {
    params->pad_before[d] = list.size() == 1 ? list[0] : list[pairs ? 2 * d : d];
    params->pad_after[d] = pairs ? list[2 * d + 1] : params->pad_before[d];
    TORCH_CHECK_VALUE(params->pad_before[d] >= 0 && params->pad_after[d] >= 0, params->op,
                      ": expected every entry of padding to be at least 0, got ", list);
  }
}

void check_tensor(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": expected ", argument,
                   " to be a strided tensor, got ", tensor.layout());
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op,
      ": expected ", argument, " to have dtype float64, float32, float16 or bfloat16, got ", dtype);
}

void check_same(const char* op, const char* argument, const at::Tensor& tensor, const char* other_name,
                const at::Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), op, ": expected ", argument,
                   " to have the dtype of ", other_name, " (", other.scalar_type(), "), got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == other.device(), op, ": expected ", argument,
                    " to be on the device of ", other_name, " (", other.device(), "), got ", tensor.device());
}

}  // namespace

const char* ConvSpec::name() const { return kNames[transposed][dims - 1]; }
const char* ConvSpec::backward_name() const { return kBackwardNames[transposed][dims - 1]; }

OwnedSpec::OwnedSpec(const ConvSpec& spec)
    : numbers_(spec),
      stride_(spec.stride),
      padding_(spec.padding),
      output_padding_(spec.output_padding),
      dilation_(spec.dilation) {
  PaddingMode mode = PaddingMode::kZeros;
  parse_padding_mode(spec.padding_mode, &mode);
  numbers_.padding_mode = padding_mode_name(mode);
  if (spec.splits.has_value()) splits_.emplace(at::IntArrayRef(*spec.splits));
}

ConvSpec OwnedSpec::get() const {
  ConvSpec spec = numbers_;
  spec.stride = stride_;
  spec.padding = padding_;
  spec.output_padding = output_padding_;
  spec.dilation = dilation_;
  if (splits_) spec.splits = at::IntArrayRef(*splits_);
  return spec;
}

ConvParams check_params(const ConvSpec& spec, const char* op) {
  ConvParams params;
  params.op = op;
  params.dims = spec.dims;
  params.transposed = spec.transposed;
  params.groups = spec.groups;
  expand(params, "stride", spec.stride, 1, &params.stride);
  expand(params, "dilation", spec.dilation, 1, &params.dilation);
  expand_padding(&params, spec.padding);
  TORCH_CHECK_VALUE(spec.groups >= 1, op, ": expected groups to be at least 1, got ", spec.groups);
  if (spec.transposed) {
    expand(params, "output_padding", spec.output_padding, 0, &params.output_padding);
    for (const auto d : irange(params.dims)) {
      TORCH_CHECK_VALUE(
          params.output_padding[d] < std::max(params.stride[d], params.dilation[d]), op,
          ": expected output_padding to be smaller than stride or dilation, got output_padding ",
          spec.output_padding, ", stride ", spec.stride, ", dilation ", spec.dilation);
    }
  } else {
    TORCH_CHECK_VALUE(parse_padding_mode(spec.padding_mode, &params.mode), op,
                      ": expected padding_mode to be 'zeros', 'reflect', 'replicate' or 'circular', got '",
                      spec.padding_mode, "'");
    // Without padding there is nothing for a mode to fill.
    if (params.pad_before == kNone && params.pad_after == kNone) {
      params.mode = PaddingMode::kZeros;
    }
  }
  if (spec.splits.has_value()) {
    std::array<int64_t, 3> splits = {1, 1, 1};
    const at::IntArrayRef list = *spec.splits;
    expand(params, "splits", list, 1, &splits);
    // One number cuts the first spatial dimension only.
    if (list.size() == 1) std::fill(splits.begin() + 1, splits.end(), 1);
    params.splits.assign(splits.begin(), splits.begin() + params.dims);
  }
  return params;
}

template <typename Int>
std::vector<Int> check_sizes(const ConvParams& params, c10::ArrayRef<Int> input, c10::ArrayRef<Int> weight) {
  const auto dims = static_cast<size_t>(params.dims);
  const char* op = params.op;
  TORCH_CHECK_VALUE(weight.size() == dims + 2, op, ": expected weight to have ", dims + 2, " dimensions ",
                    params.transposed ? "(C, K/groups, " : "(K, C/groups, ", kKernelShape[dims - 1], ", got ",
                    weight.size());
  TORCH_CHECK_VALUE(input.size() == dims + 1 || input.size() == dims + 2, op, ": expected input to have ",
                    dims + 1, " or ", dims + 2, " dimensions ", kInputShape[dims - 1], ", got ",
                    input.size());
  const bool batched = input.size() == dims + 2;
  const Int channels = input[batched ? 1 : 0];
  const Int expected = params.transposed ? weight[0] : weight[1] * params.groups;
  TORCH_CHECK_VALUE(weight[0] >= 1 && weight[1] >= 1 && weight[0] % params.groups == 0, op,
                    ": expected dimension 0 of weight to be a positive multiple of groups (", params.groups,
                    ") and dimension 1 to be positive, got weight of shape ", weight);
  TORCH_CHECK_VALUE(channels == expected, op, ": expected input to have ", expected,
                    " channels for weight of shape ", weight, " and groups ", params.groups, ", got ",
                    channels);

  std::vector<Int> output;
  output.reserve(dims + 2);
  if (batched) output.push_back(input[0]);
  output.push_back(params.transposed ? weight[1] * params.groups : weight[0]);
  for (const auto d : irange(dims)) {
    const Int size = input[(batched ? 2 : 1) + d];
    TORCH_CHECK_VALUE(weight[2 + d] >= 1, op,
                      ": expected every kernel size to be at least 1, got weight of shape ", weight);
    const Int reach = (weight[2 + d] - 1) * params.dilation[d] + 1;
    const int64_t before = params.pad_before[d];
    const int64_t after = params.pad_after[d];
    if (params.transposed) {
      const Int out = (size - 1) * params.stride[d] - before - after + reach + params.output_padding[d];
      TORCH_CHECK_VALUE(size >= 1 && out >= 1, op, ": expected every output size to be at least 1, got ", out,
                        " in spatial dimension ", d, " for input of shape ", input);
      output.push_back(out);
      continue;
    }
    if (params.mode == PaddingMode::kReflect) {
      TORCH_CHECK_VALUE(before < size && after < size, op,
                        ": expected reflect padding to be smaller than the input, got padding (", before,
                        ", ", after, ") for size ", size, " in spatial dimension ", d);
    } else if (params.mode == PaddingMode::kCircular) {
      TORCH_CHECK_VALUE(before <= size && after <= size, op,
                        ": expected circular padding to be no larger than the input, got padding (", before,
                        ", ", after, ") for size ", size, " in spatial dimension ", d);
    } else if (params.mode == PaddingMode::kReplicate) {
      TORCH_CHECK_VALUE(size >= 1, op,
                        ": expected an input that is not empty for replicate padding, got size ", size,
                        " in spatial dimension ", d);
    }
    const Int padded = size + (before + after);
    TORCH_CHECK_VALUE(padded >= reach, op,
                      ": expected the kernel to fit the padded input, got kernel extent ", reach,
                      " for padded size ", padded, " in spatial dimension ", d);
    output.push_back((padded - reach) / params.stride[d] + 1);
  }
  return output;
}

template std::vector<int64_t> check_sizes(const ConvParams&, c10::ArrayRef<int64_t>, c10::ArrayRef<int64_t>);
template std::vector<c10::SymInt> check_sizes(const ConvParams&, c10::ArrayRef<c10::SymInt>,
                                              c10::ArrayRef<c10::SymInt>);

void check_forward_tensors(const ConvParams& params, const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias) {
  check_tensor(params.op, "input", input);
  check_tensor(params.op, "weight", weight);
  check_same(params.op, "weight", weight, "input", input);
  if (bias.has_value() && bias->defined()) {
    const c10::SymInt channels = params.transposed ? weight.sym_size(1) * params.groups : weight.sym_size(0);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == channels, params.op,
                      ": expected bias to have shape [", channels, "], got ", bias->sym_sizes());
    check_same(params.op, "bias", *bias, "input", input);
  }
}

void check_backward_tensors(const ConvParams& params, const at::Tensor& grad_output,
                            const std::optional<at::Tensor>& input, const std::optional<at::Tensor>& weight,
                            c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                            const std::array<bool, 3>& output_mask) {
  const auto output_size = check_sizes<c10::SymInt>(params, input_size, weight_size);
  check_tensor(params.op, "grad_output", grad_output);
  TORCH_CHECK_VALUE(grad_output.sym_sizes().equals(output_size), params.op,
                    ": expected grad_output to have shape ", c10::SymIntArrayRef(output_size), ", got ",
                    grad_output.sym_sizes());
  auto check = [&](const char* argument, const std::optional<at::Tensor>& tensor, c10::SymIntArrayRef size,
                   bool needed, const char* purpose) {
    const bool given = tensor.has_value() && tensor->defined();
    TORCH_CHECK_VALUE(given || !needed, params.op, ": expected ", argument, " for the gradient of ", purpose,
                      ", got None");
    if (!given) return;
    check_same(params.op, argument, *tensor, "grad_output", grad_output);
    TORCH_CHECK_VALUE(tensor->sym_sizes().equals(size), params.op, ": expected ", argument, " to have shape ",
                      size, ", got ", tensor->sym_sizes());
  };
  check("input", input, input_size, output_mask[1], "weight");
  check("weight", weight, weight_size, output_mask[0], "input");
}

at::MemoryFormat output_format(const at::Tensor& input, const at::Tensor& weight) {
  for (const at::Tensor* tensor : {&input, &weight}) {
    if (!tensor->defined()) continue;
    const auto format = tensor->suggest_memory_format();
    if (format != at::MemoryFormat::Contiguous) return format;
  }
  return at::MemoryFormat::Contiguous;
}

at::MemoryFormat weight_format(const std::optional<at::Tensor>& weight) {
  return weight.has_value() && weight->defined() ? weight->suggest_memory_format()
                                                 : at::MemoryFormat::Contiguous;
}

}  // namespace patchconv
