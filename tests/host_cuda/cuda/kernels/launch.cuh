// csrc/cuda/kernels/launch.cuh for a CPU.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/kernels/stream.h"
#include "executor.h"

namespace patchconv::kernels {

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, int64_t shared_bytes, Stream /*stream*/,
            Arguments&&... arguments) {
  if (grid.x <= 0 || grid.y <= 0) return;
  if (grid.x > kMostBlocks) throw LaunchError("a grid of more than 2^31 - 1 blocks");
  if (grid.y > kMostBlocksDown) throw LaunchError("a grid of more than 65535 blocks along y");
  if (threads > 1024 || shared_bytes > host_cuda::shared_limit()) {
    throw LaunchError("a block that this GPU does not take");
  }
  host_cuda::run(grid.x, grid.y, threads, shared_bytes, [&] { kernel(arguments...); });
}

}  // namespace patchconv::kernels
