// Dropout from a seed (core/philox.h), on the device: the same mask as on the CPU.
#pragma once

#include <cstdint>

#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// An element is dropped with the probability threshold / 2^32 and becomes x * 0 + fill; otherwise
// x * scale + shift. Without shift and fill nothing is added.
struct Dropout {
  const void* x = nullptr;
  void* y = nullptr;              // may be x
  const int64_t* seed = nullptr;  // on the device: a captured graph draws a new one each time
  int64_t count = 0;              // of dense memory, x and y in the same order
  uint64_t threshold = 0;         // philox_threshold(p)
  float scale = 1, shift = 0, fill = 0;
};
void launch_dropout(Type type, const Dropout& call, Stream stream);

}  // namespace patchconv::kernels
