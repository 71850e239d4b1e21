// The one way to start a kernel. tests/host_cuda has another file of this name, which runs it on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// Starts kernel(arguments...) in blocks of `threads`, each with `shared_bytes` of shared memory. Does nothing
// for an empty grid. Throws LaunchError.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, int64_t shared_bytes, Stream stream,
            Arguments&&... arguments) {
  if (grid.x <= 0 || grid.y <= 0) return;
  if (grid.x > kMostBlocks) throw LaunchError("a grid of more than 2^31 - 1 blocks");
  if (grid.y > kMostBlocksDown) throw LaunchError("a grid of more than 65535 blocks along y");
  if (shared_bytes > 48 * 1024) {
    // All that the device has, not only what this launch takes: another thread may be starting the same
    // kernel.
    int device = 0, most = 0;
    check(static_cast<int>(cudaGetDevice(&device)));
    check(static_cast<int>(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
    check(static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most)));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  check(static_cast<int>(
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...)));
}

}  // namespace patchconv::kernels
