#include "cuda/conv_turn.h"

#include "cuda/kernel_call.h"
#include "cuda/kernels/conv.h"

namespace patchconv {

using at::Tensor;

namespace {

constexpr int64_t kFewChannels = 16;  // of the 64 that a block takes

kernels::ConvTensor strides_of(const Tensor& tensor, const void* data) {
  kernels::ConvTensor found;
  found.data = data;
  found.image = tensor.stride(0);
  found.channel = tensor.stride(1);
  for (int64_t d = 2; d < tensor.dim(); ++d) found.place[d - tensor.dim() + 3] = tensor.stride(d);
  return found;
}

}  // namespace

bool copy_turned(const Tensor& from, at::IntArrayRef first, const Tensor& to) {
  const int64_t dims = to.dim() - 2, bytes = to.element_size();
  const bool to_channels = from.stride(-1) == 1 && to.stride(1) == 1;
  const bool to_columns = from.stride(1) == 1 && to.stride(-1) == 1;
  // Few columns, too, are a contiguous copy for one of the two.
  if (to_channels == to_columns || from.scalar_type() != to.scalar_type() || (bytes != 2 && bytes != 4) ||
      to.size(1) < kFewChannels || to.size(-1) < kFewChannels || dims < 1 || dims > 3) {
    return false;
  }
  kernels::ConvTurn turn;
  turn.from = strides_of(from, from.const_data_ptr());
  turn.to = strides_of(to, to.mutable_data_ptr());
  turn.images = to.size(0);
  turn.channels = to.size(1);
  for (int64_t d = 0; d < dims; ++d) {
    turn.sizes[d - dims + 3] = to.size(2 + d);
    turn.first[d - dims + 3] = first[d];
    turn.extents[d - dims + 3] = from.size(2 + d);
  }
  kernels::launch_conv_turn(static_cast<int>(bytes), turn, current_stream(to));
  return true;
}

}  // namespace patchconv
