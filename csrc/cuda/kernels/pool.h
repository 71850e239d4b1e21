// Max pools that save the position of each maximum in its window, and average pools (core/pool.h), on the
// device.
#pragma once

#include <array>
#include <cstdint>

#include "core/pool.h"
#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// Tensors are (outer, depth, height, width, inner), dense in that order. outer and inner are planes and 1, or
// images and channels.
struct PoolShape {
  std::array<PoolDim, 3> dims;
  int64_t outer = 0;
  int64_t inner = 1;
};

// Whether its sizes fit the integers that the kernels count with.
bool serves(const PoolShape& pool);

struct MaxPool : PoolShape {
  int offset_bytes = 1;  // 1 or 2
};

// y: the maxima; offsets: their positions. With `take` the offsets are read, and y gets the values at these
// positions.
void launch_max_pool(Type type, const MaxPool& pool, const void* x, void* y, void* offsets, bool take,
                     Stream stream);

// The gradient of the input. Each element sums over the windows that contain it, in the order of the outputs:
// the same bits each time, without atomics. In float32, rounded once.
void launch_max_pool_backward(Type type, const MaxPool& pool, const void* grad, const void* offsets,
                              void* result, Stream stream);

// A window's sum divided by `divisor` or, if that is 0, by its number of elements: those inside the input
// and, with `count_padding`, those in the padding (what lies behind the padding never counts). In float32,
// rounded once.
struct AvgPool : PoolShape {
  bool count_padding = true;
  int64_t divisor = 0;
};
void launch_avg_pool(Type type, const AvgPool& pool, const void* x, void* y, Stream stream);
// Summed over windows in their order, as above.
void launch_avg_pool_backward(Type type, const AvgPool& pool, const void* grad, void* result, Stream stream);

}  // namespace patchconv::kernels
