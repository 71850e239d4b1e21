// Convolution passes by this project's own kernels: which kernel serves a pass, and its launches.
#pragma once

#include "tiled/engine.h"

namespace patchconv {

// With backend "native" always one of them, with "auto" if the architecture's rules (core/conv_rules.h) say
// so.
NativeKernel choose_native_kernel(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                                  at::MemoryFormat format);
bool native_kernel_writes_bits(const ConvProblem& problem, ConvPass pass, const at::Tensor& target);

// As ConvEngine's native_grid(), native_weight() and native_bias(), for tensors on the current device.
void run_native_grid(const ConvProblem& problem, ConvPass pass, const at::Tensor& source,
                     const at::Tensor& bits, const at::Tensor& weight, const Epilogue& epilogue,
                     const at::Tensor& target);
at::Tensor run_native_weight(const ConvProblem& problem, const at::Tensor& big, const at::Tensor& small,
                             const at::Tensor& bits);
// Sums over all dimensions of (N, C, ...) but C: the bias's gradient.
at::Tensor run_native_channel_sums(const at::Tensor& source, const at::Tensor& bits);

}  // namespace patchconv
