#include "cpu/conv_weight.h"

#include <algorithm>

#include "cpu/processor.h"

namespace patchconv {

using at::Tensor;

bool writes_past_end(const ConvProblem& problem) {
  constexpr int64_t kBlock = 16;  // channels
  return problem.kernel_volume() == 1 &&
         (problem.big_channels % kBlock != 0 || problem.small_channels % kBlock != 0) &&
         std::any_of(problem.dims.begin(), problem.dims.end(), [](const ConvDim& d) { return d.stride > 1; });
}

WeightGradient weight_gradient_way(const ConvProblem& problem, at::ScalarType dtype) {
  constexpr int64_t kLeastChannels = 8;
  const bool several = problem.groups == 1 && problem.big_channels >= kLeastChannels &&
                       problem.small_channels >= kLeastChannels;
  if (!several) return WeightGradient::kStock;
  return has_avx512() && dtype == at::kFloat && problem.dims.size() == 2 && !writes_past_end(problem)
             ? WeightGradient::kChannelsLast
             : WeightGradient::kProducts;
}

void add_weight_gradient(const Tensor& big, const Tensor& small, const ConvProblem& problem,
                         const Tensor& sum) {
  // Two dimensions are three with a depth of one.
  const bool flat = problem.dims.size() == 2;
  const Tensor x = flat ? big.unsqueeze(2) : big;
  const Tensor y = flat ? small.unsqueeze(2) : small;
  const Tensor total = flat ? sum.unsqueeze(2) : sum;
  const ConvDim depth = flat ? ConvDim{} : problem.dims[0];
  const ConvDim& row = problem.dims[problem.dims.size() - 2];
  const ConvDim& column = problem.dims.back();
  const int64_t c = x.size(1);
  const int64_t k = y.size(1);
  const int64_t q = y.size(4);
  for (int64_t n = 0; n < y.size(0); ++n) {
    for (int64_t d = 0; d < y.size(2); ++d) {
      for (int64_t p = 0; p < y.size(3); ++p) {
        const Tensor out_row = y.as_strided(
            {k, q}, {1, k}, y.storage_offset() + n * y.stride(0) + d * y.stride(2) + p * y.stride(3));
        for (int64_t t = 0; t < depth.kernel; ++t) {
          for (int64_t r = 0; r < row.kernel; ++r) {
            const int64_t start = x.storage_offset() + n * x.stride(0) +
                                  (d * depth.stride + t * depth.dilation) * x.stride(2) +
                                  (p * row.stride + r * row.dilation) * x.stride(3);
            for (int64_t s = 0; s < column.kernel; ++s) {
              const Tensor in_row =
                  x.as_strided({q, c}, {column.stride * c, 1}, start + s * column.dilation * c);
              total.select(4, s).select(3, r).select(2, t).addmm_(out_row, in_row);
            }
          }
        }
      }
    }
  }
}

}  // namespace patchconv
