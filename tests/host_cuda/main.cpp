// Runs launch functions on given buffers: host_cuda FOLDER reads FOLDER/cases.txt and FOLDER/data, and writes
// what the buffers hold afterwards to FOLDER/result. tests/cuda/test_kernels.py writes cases and compares.
//
// Each line is a case: the kernel, its type (float, half, bfloat16), how many of the last blocks run (0:
// all), the count of its numbers and the numbers, the count of its buffers and, for each of them: its bytes
// (-1: a null pointer), its distance from an address that is a multiple of 256, and how many bytes at its end
// are given and written back.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "case.h"
#include "core/philox.h"
#include "cuda/kernels/dropout.h"
#include "cuda/kernels/layer_norm.h"
#include "cuda/kernels/mask.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/pool.h"
#include "executor.h"
#include "selftest.h"

namespace {

using namespace patchconv;
using namespace patchconv::kernels;
using host_cuda::Buffer;
using host_cuda::Case;
using host_cuda::Floats;

void mask_forward(const Case& c) {
  const MaskForward call{c.buffer(0),
                         c.buffer(1),
                         c.buffer(2),
                         c.buffer<uint8_t>(3),
                         c.integer(1),
                         static_cast<float>(c.number(2)),
                         static_cast<float>(c.number(3))};
  launch_mask_forward(c.type, static_cast<Mask>(c.integer(0)), call, nullptr);
}

void mask_backward(const Case& c) {
  const MaskBackward call{c.buffer(0),  c.buffer<const uint8_t>(1),      c.buffer(2),
                          c.integer(0), static_cast<float>(c.number(1)), static_cast<float>(c.number(2))};
  launch_mask_backward(c.type, call, nullptr);
}

void dropout(const Case& c) {
  const Dropout call{c.buffer(0),
                     c.buffer(1),
                     c.buffer<const int64_t>(2),
                     c.integer(0),
                     philox_threshold(c.number(1)),
                     static_cast<float>(c.number(2)),
                     static_cast<float>(c.number(3)),
                     static_cast<float>(c.number(4))};
  launch_dropout(c.type, call, nullptr);
}

// outer, inner, bytes of an offset; then for each dimension in, out, adaptive, kernel, stride, padding,
// dilation.
template <typename Description>
Description shape_of(const Case& c) {
  Description pool;
  pool.outer = c.integer(0);
  pool.inner = c.integer(1);
  for (size_t d = 0; d < 3; ++d) {
    const auto number = [&](size_t i) { return c.integer(3 + 7 * d + i); };
    pool.dims[d] = number(2) != 0
                       ? PoolDim::adaptive_to(number(0), number(1))
                       : PoolDim{number(0), number(1), false, number(3), number(4), number(5), number(6)};
  }
  return pool;
}

MaxPool pool_of(const Case& c) {
  auto pool = shape_of<MaxPool>(c);
  pool.offset_bytes = static_cast<int>(c.integer(2));
  return pool;
}

// As above, but with whether padding counts in place of the bytes, and with the divisor at the end.
AvgPool avg_pool_of(const Case& c) {
  auto pool = shape_of<AvgPool>(c);
  pool.count_padding = c.integer(2) != 0;
  pool.divisor = c.integer(24);
  return pool;
}

// images, channels, pixels, groups, channels_last, eps, momentum; then activation and training.
NormShape norm_of(const Case& c) {
  return {c.integer(0), c.integer(1), c.integer(2), c.integer(3), c.integer(4) != 0};
}

// mean, var, weight and bias from buffer `first` on.
NormAffine affine_of(const Case& c, size_t first) {
  return {c.buffer<const float>(first), c.buffer<const float>(first + 1), c.buffer<const float>(first + 2),
          c.buffer<const float>(first + 3), static_cast<float>(c.number(5))};
}

void norm_statistics(const Case& c) {
  const Floats workspace(norm_statistics_workspace(c.type, norm_of(c)), c);
  const NormStatistics call{c.buffer(0),
                            workspace.data,
                            c.buffer<float>(1),
                            c.buffer<float>(2),
                            c.buffer<float>(3),
                            c.buffer<float>(4),
                            static_cast<float>(c.number(6))};
  launch_norm_statistics(c.type, norm_of(c), call, nullptr);
}

void norm_map(const Case& c) {
  launch_norm_map(c.type, norm_of(c), affine_of(c, 2), static_cast<Activation>(c.integer(7)), c.buffer(0),
                  c.buffer(1), nullptr);
}

void norm_mask(const Case& c) {
  const Floats workspace(c.integer(1), c);
  launch_norm_mask(c.type, norm_of(c), affine_of(c, 3), workspace.data, c.buffer(0), c.buffer(1),
                   c.buffer<uint8_t>(2), nullptr);
}

void norm_backward(const Case& c) {
  const Floats workspace(norm_backward_workspace(c.type, norm_of(c)), c);
  const NormBackward call{c.buffer(0), c.buffer(1),        c.integer(8) != 0, workspace.data,
                          c.buffer(6), c.buffer<float>(7), c.buffer<float>(8)};
  launch_norm_backward(c.type, norm_of(c), affine_of(c, 2), static_cast<Activation>(c.integer(7)), call,
                       nullptr);
}

// rows, columns, eps; weight and bias in buffers `first` and the next.
LayerNorm layer_norm_of(const Case& c, size_t first) {
  return {c.integer(0), c.integer(1), c.buffer<const float>(first), c.buffer<const float>(first + 1),
          static_cast<float>(c.number(2))};
}

void layer_norm(const Case& c) {
  launch_layer_norm(c.type, layer_norm_of(c, 4), c.buffer(0), c.buffer(1), c.buffer<float>(2),
                    c.buffer<float>(3), nullptr);
}

void layer_norm_backward(const Case& c) {
  const LayerNorm norm = layer_norm_of(c, 4);
  const Floats workspace(layer_norm_workspace(c.type, norm), c);
  const LayerNormBackward call{c.buffer(0),    c.buffer(1), c.buffer<const float>(2), c.buffer<float>(3),
                               workspace.data, c.buffer(6), c.buffer<float>(7),       c.buffer<float>(8)};
  launch_layer_norm_backward(c.type, norm, call, nullptr);
}

const std::map<std::string, std::function<void(const Case&)>> kKernels{
    {"selftest_sum",
     [](const Case& c) { host_cuda::launch_sum(c.buffer<float>(0), c.buffer<float>(1), c.integer(0)); }},
    {"selftest_fault",
     [](const Case& c) {
       host_cuda::launch_fault(static_cast<host_cuda::Fault>(c.integer(0)), c.buffer<float>(0));
     }},
    {"selftest_votes",
     [](const Case& c) { host_cuda::launch_votes(c.buffer<float>(0), c.buffer<float>(1)); }},
    {"selftest_product",
     [](const Case& c) {
       host_cuda::launch_product(c.type, c.buffer(0), c.buffer(1), c.buffer<float>(2),
                                 static_cast<int>(c.integer(0)));
     }},
    {"dropout", dropout},
    {"layer_norm", layer_norm},
    {"layer_norm_backward", layer_norm_backward},
    {"mask_forward", mask_forward},
    {"norm_backward", norm_backward},
    {"norm_map", norm_map},
    {"norm_mask", norm_mask},
    {"norm_statistics", norm_statistics},
    {"avg_pool",
     [](const Case& c) { launch_avg_pool(c.type, avg_pool_of(c), c.buffer(0), c.buffer(1), nullptr); }},
    {"avg_pool_backward",
     [](const Case& c) {
       launch_avg_pool_backward(c.type, avg_pool_of(c), c.buffer(0), c.buffer(1), nullptr);
     }},
    {"max_pool",
     [](const Case& c) {
       launch_max_pool(c.type, pool_of(c), c.buffer(0), c.buffer(1), c.buffer(2), false, nullptr);
     }},
    {"max_pool_take",
     [](const Case& c) {
       launch_max_pool(c.type, pool_of(c), c.buffer(0), c.buffer(1), c.buffer(2), true, nullptr);
     }},
    {"max_pool_backward",
     [](const Case& c) {
       launch_max_pool_backward(c.type, pool_of(c), c.buffer(0), c.buffer(1), c.buffer(2), nullptr);
     }},
    {"mask_backward", mask_backward},
};

Type type_of(const std::string& name) {
  if (name == "float") return Type::kFloat;
  if (name == "half") return Type::kHalf;
  if (name == "bfloat16") return Type::kBFloat16;
  if (name == "double") return Type::kDouble;
  throw std::invalid_argument("no type " + name);
}

void run(const std::string& line, std::istream& data, std::ostream& result) {
  std::istringstream words(line);
  std::string kernel, type;
  int64_t last_blocks = 0;
  size_t numbers = 0, buffers = 0;
  words >> kernel >> type >> last_blocks >> numbers;
  Case c{type_of(type), last_blocks, std::vector<double>(numbers), {}};
  for (double& number : c.numbers) words >> number;
  words >> buffers;
  for (size_t i = 0; i < buffers; ++i) {
    int64_t bytes = 0, off = 0, window = 0;
    words >> bytes >> off >> window;
    c.buffers.emplace_back(bytes, off, window);
    data.read(c.buffers.back().window_begin(), c.buffers.back().window());
  }
  if (!words || !data) throw std::invalid_argument("not a case: " + line);
  host_cuda::run_last_blocks_only(last_blocks);
  const auto& convolutions = host_cuda::conv_kernels();
  const auto found = convolutions.find(kernel);
  (found != convolutions.end() ? found->second : kKernels.at(kernel))(c);
  for (const Buffer& buffer : c.buffers) result.write(buffer.window_begin(), buffer.window());
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: host_cuda FOLDER\n";
    return 2;
  }
  const std::string folder = arguments[1];
  std::ifstream cases(folder + "/cases.txt"), data(folder + "/data", std::ios::binary);
  std::ofstream result(folder + "/result", std::ios::binary);
  std::string line;
  while (std::getline(cases, line)) {
    try {
      run(line, data, result);
    } catch (const std::exception& error) {
      std::cerr << line << ": " << error.what() << "\n";
      return 1;
    }
  }
  return result.flush() ? 0 : 1;
}
