// csrc/cuda/kernels/launch.cuh for a CPU.
#pragma once

#include <cstdint>
#include <tuple>
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
  const std::tuple<Parameters...> all(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  host_cuda::Launch launch{grid.x, grid.y, threads, shared_bytes, [&] { std::apply(kernel, all); }};
  launch.kernel = reinterpret_cast<const void*>(kernel);
  std::apply([&](const auto&... one) { launch.arguments = {{&one, sizeof(one)}...}; }, all);
  host_cuda::run(launch);
}

}  // namespace patchconv::kernels
