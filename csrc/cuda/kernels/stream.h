// What launch functions share, without a CUDA header: the stream as a plain pointer, grids, errors and number
// formats.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace patchconv::kernels {

using Stream = void*;  // a cudaStream_t

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(int error);  // a cudaError_t; throws LaunchError with CUDA's text

// Blocks of a grid that one launch may have along x.
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

constexpr int kMostBlocksDown = 65535;  // along y

struct Grid {
  int64_t x = 1;
  int y = 1;
};

enum class Type { kFloat, kHalf, kBFloat16, kDouble };

// Half precision is stored as bits; arithmetic is in float.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace patchconv::kernels
