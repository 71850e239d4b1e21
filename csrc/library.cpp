// Every operator's schema, in one place. Implementations register themselves by dispatch key in the other
// rooms.
//
// `padding` takes one number, one a spatial dimension, or two a dimension: (before, after) of the first, and
// so on. `splits` is the number of pieces the output is cut into: nothing (automatic), one number (the first
// spatial dimension) or one a dimension. In the *_backward operators `input` is needed only where the
// weight's gradient is asked for, `weight` only where the input's is; `output_mask` asks for (input, weight,
// bias).
#include <torch/library.h>

#define PATCHCONV_CONV(D)                                                                                    \
  m.def("conv" #D "d(Tensor input, Tensor weight, Tensor? bias=None, int[" #D "] stride=1, int[" #D          \
        "] padding=0, int[" #D                                                                               \
        "] dilation=1, int groups=1, *, str padding_mode=\"zeros\", int[1]? splits=None"                     \
        ") -> Tensor");                                                                                      \
  m.def(                                                                                                     \
      "conv" #D                                                                                              \
      "d_backward(Tensor grad_output, Tensor? input, Tensor? weight, SymInt[] input_size, SymInt[] "         \
      "weight_size, int[" #D "] stride, int[" #D "] padding, int[" #D                                        \
      "] dilation, int groups, *, str padding_mode=\"zeros\", int[1]? splits=None, bool[3] output_mask) -> " \
      "(Tensor, Tensor, Tensor)");                                                                           \
  m.def("conv_transpose" #D "d(Tensor input, Tensor weight, Tensor? bias=None, int[" #D                      \
        "] stride=1, int[" #D "] padding=0, int[" #D "] output_padding=0, int groups=1, int[" #D             \
        "] dilation=1, *, int[1]? splits=None) -> Tensor");                                                  \
  m.def("conv_transpose" #D                                                                                  \
        "d_backward(Tensor grad_output, Tensor? input, Tensor? weight, SymInt[] input_size, SymInt[] "       \
        "weight_size, int[" #D "] stride, int[" #D "] padding, int[" #D                                      \
        "] output_padding, int groups, int[" #D                                                              \
        "] dilation, *, int[1]? splits=None, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");

TORCH_LIBRARY(patchconv, m) {
  PATCHCONV_CONV(1)
  PATCHCONV_CONV(2)
  PATCHCONV_CONV(3)
}
