// Every operator's schema, in one place. Implementations register themselves by dispatch key, in the folders
// beside this file.
//
// `padding` takes one number, one per spatial dimension, or two per dimension: (before, after) of the first,
// and so on. `splits` is the number of pieces the output is cut into: None (automatic), one number (the first
// spatial dimension) or one per dimension.
#include <torch/library.h>

#include "ops/activation_masked.h"
#include "ops/activation_smooth.h"

TORCH_LIBRARY(patchconv, m) {
#define PATCHCONV_CONV(D)                                                                           \
  m.def("conv" #D "d(Tensor input, Tensor weight, Tensor? bias=None, int[" #D "] stride=1, int[" #D \
        "] padding=0, int[" #D                                                                      \
        "] dilation=1, int groups=1, *, str padding_mode=\"zeros\", int[1]? splits=None"            \
        ") -> Tensor");                                                                             \
  m.def("conv_transpose" #D "d(Tensor input, Tensor weight, Tensor? bias=None, int[" #D             \
        "] stride=1, int[" #D "] padding=0, int[" #D "] output_padding=0, int groups=1, int[" #D    \
        "] dilation=1, *, int[1]? splits=None) -> Tensor");
  PATCHCONV_CONV(1)
  PATCHCONV_CONV(2)
  PATCHCONV_CONV(3)
#undef PATCHCONV_CONV
  m.def(
      "conv2d_fused(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] "
      "dilation=1, int groups=1, *, Tensor? scale=None, Tensor? residual=None, bool relu=False, str "
      "padding_mode=\"zeros\", int[1]? splits=None) -> Tensor");

  // What these call, with arguments that are checked (ops/conv.h). A list has one entry per dimension,
  // padding two. For backward, `input` is needed only if the weight's gradient is asked for, `weight` only if
  // the input's is; `output_mask` asks for (input, weight, bias).
  m.def(
      "_convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
      "int[] output_padding, int[] splits, int groups, bool transposed, str padding_mode) -> Tensor");
  m.def(
      "_convolution_backward(Tensor grad_output, Tensor? input, Tensor? weight, SymInt[] input_size, "
      "SymInt[] "
      "weight_size, int[] stride, int[] padding, int[] dilation, int[] output_padding, int[] splits, int "
      "groups, bool transposed, str padding_mode, bool[3] output_mask, Tensor? bits) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "_convolution_fused(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, bool "
      "relu, bool mask, int[] stride, int[] padding, int[] dilation, int[] splits, int groups, str "
      "padding_mode) -> (Tensor, Tensor)");

  // conv3d without gradients by oneDNN on a CPU, also where torch takes another library for a small volume.
  m.def(
      "_conv3d_onednn(Tensor input, Tensor weight, Tensor? bias, int[3] stride, int[3] padding, int[3] "
      "dilation, int groups) -> Tensor");

  // Activations, as torch's own. The _mask operators are described in core/mask.h and ops/activation.h.
  m.def("prelu(Tensor input, Tensor weight) -> Tensor");
  const auto activation = [&](const std::string& name, const char* arguments, bool in_place) {
    m.def((name + "(Tensor input" + arguments + ") -> Tensor").c_str());
    if (in_place) m.def((name + "_(Tensor(a!) input" + arguments + ") -> Tensor(a!)").c_str());
  };
  patchconv::masked::for_each_row([&]<typename Row>(Row) {
    activation(Row::kName, Row::kArguments, patchconv::masked::has_in_place<Row>);
  });
  patchconv::smooth::for_each_row([&]<typename Row>(Row) {
    activation(Row::kName, Row::kArguments, patchconv::smooth::has_operator_in_place<Row>);
  });
  m.def("_mask_forward(Tensor input, int kind, float a, float b) -> (Tensor, Tensor)");
  m.def("_mask_forward_(Tensor(a!) input, int kind, float a, float b) -> Tensor");
  m.def("_add_mask_forward(Tensor input, Tensor other) -> (Tensor, Tensor)");
  m.def("_mask_pack(Tensor input, int kind, float a, float b) -> Tensor");
  m.def("_mask_backward(Tensor grad, Tensor bits, float inside, float outside) -> Tensor");

  // Norms. `training`: with the batch's own statistics, which also update the running ones if they are given.
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, "
      "bool training, float momentum, float eps) -> Tensor");
  m.def(
      "instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, bool use_input_stats, float momentum, float eps) -> Tensor");
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> "
      "Tensor");
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
      "eps=1e-05) -> Tensor");
  m.def("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor");
  // With an activation in the same pass.
  m.def(
      "batch_norm_relu(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, bool training, float momentum, float eps) -> Tensor");
  m.def(
      "group_norm_silu(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float "
      "eps=1e-05) -> Tensor");
  // Their parts; `activation` is an Activation of core/norm.h.
  m.def(
      "_batch_statistics(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum) -> "
      "(Tensor, Tensor)");
  // `groups`: 0 by channel; else `var` is 1 / sqrt(var + eps) of each image and group (ops/norm.h).
  m.def(
      "_normalize(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, int groups, float "
      "eps, "
      "int activation) -> Tensor");
  m.def(
      "_normalize_masked(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, float eps) -> "
      "(Tensor, Tensor)");
  m.def(
      "_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, int "
      "groups, float eps, int activation, bool training, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  // Writes the input's gradient over `grad`; returns those of weight and bias. By channel.
  m.def(
      "_batch_norm_backward_(Tensor(a!) grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor var, float eps, bool relu, bool training, bool[2] output_mask) -> (Tensor, Tensor)");
  m.def(
      "_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "_layer_norm_backward(Tensor grad, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_group_norm(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, int activation, "
      "ScalarType? statistics=None) -> (Tensor, Tensor, Tensor)");

  // Dropout. The mask is computed from the seed, a tensor of one int64, and never stored; core/philox.h.
  m.def("dropout(Tensor input, float p=0.5) -> Tensor");
  m.def("dropout_(Tensor(a!) input, float p=0.5) -> Tensor(a!)");
  m.def("alpha_dropout(Tensor input, float p=0.5) -> Tensor");
  m.def("feature_dropout(Tensor input, float p=0.5) -> Tensor");
  m.def("feature_alpha_dropout(Tensor input, float p=0.5) -> Tensor");
  m.def("_dropout(Tensor input, Tensor seed, float p, float scale, float shift, float fill) -> Tensor");

  // Max pools save the position of each maximum in its window; an empty `kernel_size` means adaptive.
  // core/pool.h.
  m.def(
      "max_pool1d(Tensor input, int[1] kernel_size, int[1] stride=[], int[1] padding=0, int[1] dilation=1, "
      "bool "
      "ceil_mode=False) -> Tensor");
  m.def(
      "max_pool2d(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, "
      "bool "
      "ceil_mode=False) -> Tensor");
  m.def(
      "max_pool3d(Tensor input, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, "
      "bool "
      "ceil_mode=False) -> Tensor");
  m.def("adaptive_max_pool1d(Tensor input, int[1] output_size) -> Tensor");
  m.def("adaptive_max_pool2d(Tensor input, int[2] output_size) -> Tensor");
  m.def("adaptive_max_pool3d(Tensor input, int[3] output_size) -> Tensor");
  m.def(
      "_max_pool(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, int[] "
      "output_size) -> (Tensor, Tensor)");
  m.def(
      "_max_pool_take(Tensor input, Tensor offsets, int[] kernel_size, int[] stride, int[] padding, int[] "
      "dilation) -> Tensor");
  m.def(
      "_max_pool_backward(Tensor grad, Tensor offsets, SymInt[] input_size, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation) -> Tensor");
  m.def(
      "_max_pool_indices(Tensor offsets, SymInt[] input_size, int[] kernel_size, int[] stride, int[] "
      "padding, "
      "int[] dilation) -> Tensor");

  // Average pools, whose backward needs sizes alone.
  m.def(
      "avg_pool1d(Tensor input, int[1] kernel_size, int[1] stride=[], int[1] padding=0, bool "
      "ceil_mode=False, bool "
      "count_include_pad=True) -> Tensor");
  m.def(
      "avg_pool2d(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool "
      "ceil_mode=False, bool "
      "count_include_pad=True, int? divisor_override=None) -> Tensor");
  m.def(
      "avg_pool3d(Tensor input, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool "
      "ceil_mode=False, bool "
      "count_include_pad=True, int? divisor_override=None) -> Tensor");
  m.def(
      "_avg_pool(Tensor input, bool adaptive, int[] kernel_size, int[] stride, int[] padding, bool "
      "ceil_mode, "
      "bool count_include_pad, int? divisor_override=None) -> Tensor");
  m.def(
      "_avg_pool_backward(Tensor grad, int[] input_size, MemoryFormat memory_format, bool adaptive, int[] "
      "kernel_size, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? "
      "divisor_override=None) -> Tensor");
  m.def("adaptive_avg_pool1d(Tensor input, int[1] output_size) -> Tensor");
  m.def("adaptive_avg_pool2d(Tensor input, int[2] output_size) -> Tensor");
  m.def("adaptive_avg_pool3d(Tensor input, int[3] output_size) -> Tensor");

  // Cheap operators whose output can be rebuilt from their operands.
  m.def("cat(Tensor[] tensors, int dim=0) -> Tensor");
  m.def("add(Tensor input, Tensor other, *, Scalar alpha=1) -> Tensor");
  m.def("add_(Tensor(a!) input, Tensor other, *, Scalar alpha=1) -> Tensor(a!)");
  m.def("add_relu(Tensor input, Tensor other) -> Tensor");
  m.def("mul(Tensor input, Tensor other) -> Tensor");
  m.def("glu(Tensor input, int dim=-1) -> Tensor");
  m.def("cast(Tensor input, ScalarType dtype) -> Tensor");
  m.def(
      "upsample(Tensor input, int[]? size, float[]? scale_factors, str mode='nearest', bool "
      "align_corners=False) -> Tensor");
  m.def("pad(Tensor input, int[] pad, str mode='constant', float? value=None) -> Tensor");
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
}
