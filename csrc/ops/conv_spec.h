// One struct for the arguments of the convolution operators, and the shape rules with their error messages.
//
// The six operators differ in number of dimensions, in direction and in argument order; all other code works
// on a ConvSpec. The rules are written once, for concrete sizes (CPU, CUDA) and symbolic ones (Meta).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// As the caller gave them. Non-owning: valid while the call lasts.
struct ConvSpec {
  int dims = 0;
  bool transposed = false;
  at::IntArrayRef stride;
  at::IntArrayRef padding;
  at::IntArrayRef output_padding;  // transposed only
  at::IntArrayRef dilation;
  int64_t groups = 1;
  std::string_view padding_mode = "zeros";  // not transposed only
  at::OptionalIntArrayRef splits;

  const char* name() const;           // "conv2d"
  const char* backward_name() const;  // "conv2d_backward"
};

// A ConvSpec that outlives its call.
class OwnedSpec {
 public:
  OwnedSpec() = default;
  explicit OwnedSpec(const ConvSpec& spec);  // which has been checked
  ConvSpec get() const;

 private:
  using List = c10::SmallVector<int64_t, 6>;
  ConvSpec numbers_;
  List stride_, padding_, output_padding_, dilation_;
  std::optional<List> splits_;
};

using ConvGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Checked, with one entry per dimension. 1-D operators keep dims == 1 here.
struct ConvParams {
  const char* op = "";
  int dims = 0;
  bool transposed = false;
  int64_t groups = 1;
  PaddingMode mode = PaddingMode::kZeros;
  std::array<int64_t, 3> stride = {1, 1, 1};
  std::array<int64_t, 3> dilation = {1, 1, 1};
  std::array<int64_t, 3> pad_before = {0, 0, 0};
  std::array<int64_t, 3> pad_after = {0, 0, 0};
  std::array<int64_t, 3> output_padding = {0, 0, 0};
  std::vector<int64_t> splits;  // empty: automatic
};

// Checks everything that does not depend on tensors. `op` names the operator in messages.
ConvParams check_params(const ConvSpec& spec, const char* op);

// Checks the sizes of input and weight against the parameters and returns the output's sizes: batched or not,
// as the input is. Int is int64_t or c10::SymInt.
template <typename Int>
std::vector<Int> check_sizes(const ConvParams& params, c10::ArrayRef<Int> input, c10::ArrayRef<Int> weight);

// Checks dtype, device and layout of the tensors of a forward call, and the bias's size.
void check_forward_tensors(const ConvParams& params, const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias);

// The same for a backward call. `grad_output` must have the sizes that the forward call returned. A tensor
// that a requested gradient needs must be given and have the size that is passed for it.
void check_backward_tensors(const ConvParams& params, const at::Tensor& grad_output,
                            const std::optional<at::Tensor>& input, const std::optional<at::Tensor>& weight,
                            c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                            const std::array<bool, 3>& output_mask);

// channels_last where the input or the weight has it, as stock PyTorch does.
at::MemoryFormat output_format(const at::Tensor& input, const at::Tensor& weight);

// The layout of a weight's gradient: the weight's own where it is known, so that it is accumulated without a
// copy.
at::MemoryFormat weight_format(const std::optional<at::Tensor>& weight);

}  // namespace patchconv
