// Max pools with the place of each maximum in its window (core/pool.h), on the device.
#pragma once

#include <array>
#include <cstdint>

#include "core/pool.h"
#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// Tensors are (outer, depth, height, width, inner), dense in that order: planes and 1, or images and
// channels.
struct MaxPool {
  std::array<PoolDim, 3> dims;
  int64_t outer = 0;
  int64_t inner = 1;
  int offset_bytes = 1;  // 1 or 2
};

// Whether its numbers fit what the kernels count with.
bool serves(const MaxPool& pool);

// y: the maxima; offsets: their places. With `take` the offsets are read and y is what lies there.
void launch_max_pool(Type type, const MaxPool& pool, const void* x, void* y, void* offsets, bool take,
                     Stream stream);

// The gradient of the input, summed over the windows that met each of its elements in the order of the
// outputs: the same bits each time, without atomics. In float32, rounded once.
void launch_max_pool_backward(Type type, const MaxPool& pool, const void* grad, const void* offsets,
                              void* result, Stream stream);

}  // namespace patchconv::kernels
