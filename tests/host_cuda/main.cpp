// Runs launch functions on given buffers: host_cuda FOLDER reads FOLDER/cases.txt and FOLDER/data, and writes
// what the buffers hold afterwards to FOLDER/result. tests/cuda/test_kernels.py writes cases and compares.
// With "at-once" after FOLDER, asynchronous copies arrive as soon as they begin, else when they are waited
// for; a number is the shared memory that a block may have, in KiB; ptx=FOLDER runs what nvcc wrote, which
// lies in that folder, and writes what was executed to FOLDER/counts.
//
// Each line is a case: the kernel, its type (float, half, bfloat16), how many of the last blocks run (0:
// all), the count of its numbers and the numbers, the count of its buffers and, for each of them: its bytes
// (-1: a null pointer), its distance from an address that is a multiple of 256, and how many bytes at its end
// are given and written back.
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "case.h"
#include "core/philox.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/dropout.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/norm_layer.h"
#include "cuda/kernels/pool.h"
#include "executor.h"
#include "ptx/run.h"
#include "selftest.h"

namespace {

using namespace patchconv;
using namespace patchconv::kernels;
using namespace host_cuda;

void mask_forward(const Case& c) {
  const auto bits = c.buffer<uint8_t>(3);
  const MaskForward call{c.buffer(0), c.buffer(1), c.buffer(2), bits, c.integer(1), c.real(2), c.real(3)};
  launch_mask_forward(c.type, static_cast<Mask>(c.integer(0)), call, nullptr);
}

void mask_backward(const Case& c) {
  const auto bits = c.buffer<const uint8_t>(1);
  const MaskBackward call{c.buffer(0), bits, c.buffer(2), c.integer(0), c.real(1), c.real(2)};
  launch_mask_backward(c.type, call, nullptr);
}

void dropout(const Case& c) {
  const auto seed = c.buffer<const int64_t>(2);
  const auto threshold = philox_threshold(c.number(1));
  const Dropout call{c.buffer(0), c.buffer(1), seed,      c.integer(0),
                     threshold,   c.real(2),   c.real(3), c.real(4)};
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
          c.buffer<const float>(first + 3), c.real(5)};
}

void norm_statistics(const Case& c) {
  const Floats workspace(norm_statistics_workspace(c.type, norm_of(c)), c);
  float* const results[] = {c.buffer<float>(1), c.buffer<float>(2), c.buffer<float>(3), c.buffer<float>(4)};
  const NormStatistics call{c.buffer(0), workspace.data, results[0], results[1],
                            results[2],  results[3],     c.real(6)};
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
          c.real(2)};
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

void avg_pool(const Case& c) { launch_avg_pool(c.type, avg_pool_of(c), c.buffer(0), c.buffer(1), nullptr); }

void avg_pool_backward(const Case& c) {
  launch_avg_pool_backward(c.type, avg_pool_of(c), c.buffer(0), c.buffer(1), nullptr);
}

template <bool take>
void max_pool(const Case& c) {
  launch_max_pool(c.type, pool_of(c), c.buffer(0), c.buffer(1), c.buffer(2), take, nullptr);
}

void max_pool_backward(const Case& c) {
  launch_max_pool_backward(c.type, pool_of(c), c.buffer(0), c.buffer(1), c.buffer(2), nullptr);
}

void selftest_sum(const Case& c) { launch_sum(c.buffer<float>(0), c.buffer<float>(1), c.integer(0)); }

void selftest_fault(const Case& c) { launch_fault(static_cast<Fault>(c.integer(0)), c.buffer<float>(0)); }

void selftest_votes(const Case& c) { launch_votes(c.buffer<float>(0), c.buffer<float>(1)); }

void selftest_product(const Case& c) {
  const auto k = static_cast<int>(c.integer(0));
  launch_product(c.type, c.buffer(0), c.buffer(1), c.buffer<float>(2), k);
}

const std::map<std::string, std::function<void(const Case&)>> kKernels{
    {"selftest_sum", selftest_sum},
    {"selftest_fault", selftest_fault},
    {"selftest_votes", selftest_votes},
    {"selftest_product", selftest_product},
    {"dropout", dropout},
    {"layer_norm", layer_norm},
    {"layer_norm_backward", layer_norm_backward},
    {"norm_map", norm_map},
    {"norm_mask", norm_mask},
    {"norm_statistics", norm_statistics},
    {"norm_backward", norm_backward},
    {"mask_forward", mask_forward},
    {"mask_backward", mask_backward},
    {"avg_pool", avg_pool},
    {"avg_pool_backward", avg_pool_backward},
    {"max_pool_backward", max_pool_backward},
    {"max_pool", max_pool<false>},
    {"max_pool_take", max_pool<true>},
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
  run_last_blocks_only(last_blocks);
  const auto& convolutions = conv_kernels();
  const auto found = convolutions.find(kernel);
  (found != convolutions.end() ? found->second : kKernels.at(kernel))(c);
  for (const Buffer& buffer : c.buffers) result.write(buffer.window_begin(), buffer.window());
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: host_cuda FOLDER [at-once] [ptx=FOLDER] [KIBIBYTES]\n";
    return 2;
  }
  bool by_ptx = false;
  for (int i = 2; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "at-once") {
      copy_at_once(true);
    } else if (word.substr(0, 4) == "ptx=") {
      by_ptx = true;
      ptx::run_from(word.substr(4));
    } else {
      set_shared_limit(std::stoi(word) * 1024);
    }
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
  if (by_ptx) {
    std::ofstream counts(folder + "/counts");
    ptx::write_counts(counts);
  }
  return result.flush() ? 0 : 1;
}
