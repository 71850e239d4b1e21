#include "ops/conv_explain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "core/settings.h"
#include "ops/conv_checks.h"
#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;

namespace {

at::ScalarType dtype_of(const std::string& name) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const char* const known = dtype == at::kFloat    ? "float32"
                              : dtype == at::kDouble ? "float64"
                              : dtype == at::kHalf   ? "float16"
                                                     : "bfloat16";
    if (name == known) return dtype;
  }
  TORCH_CHECK_TYPE(false, "explain: expected dtype float64, float32, float16 or bfloat16, got ", name);
}

// Sizes that no tensor can have would overflow the planner's estimates.
void check_size(const std::vector<int64_t>& size) {
  double elements = 1;
  for (const int64_t s : size) elements *= static_cast<double>(s);
  TORCH_CHECK_VALUE(elements < 0x1p56, "explain: expected tensors of fewer than 2^56 elements, got shape ",
                    size);
}

}  // namespace

Tensor stand_in(const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                const std::string& dtype) {
  check_size(size);
  const auto options = at::TensorOptions().device(at::kMeta).dtype(dtype_of(dtype));
  return stride.empty() ? at::empty(size, options) : at::empty_strided(size, stride, options);
}

ConvExplanation explain_conv(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                             const std::string& device, const std::string& asked) {
  ConvExplanation result;
  result.output_size = check_sizes<int64_t>(spec, input.sizes(), weight.sizes());
  check_size(result.output_size);
  const ConvEngine* engine = find_engine(device);
  TORCH_CHECK_VALUE(engine != nullptr, "explain: expected device to be one this build serves, got ", device);
  check_forward_tensors(spec, input, weight, std::nullopt);
  const auto dims = static_cast<int64_t>(spec.dims.size());
  const Lift lift{input.dim() == dims + 2, dims == 1};
  const Tensor in = lift(input);
  const Tensor w = lift.weight(weight);
  const ConvProblem problem(spec, lift.batched_sizes(input.sizes()), weight.sizes().vec());
  TensorFacts facts = tensor_facts(problem, in, w);
  if (asked != "fprop") {
    // The output's gradient is assumed to have the output's layout.
    const auto sizes =
        spec.transposed ? problem.big_sizes(problem.batch) : problem.small_sizes(problem.batch);
    const Tensor grad = at::empty(sizes, in.options().memory_format(facts.format));
    facts = asked == "dgrad" ? tensor_facts(problem, grad, w) : tensor_facts(problem, {in, grad}, w);
  }
  facts.exact_bytes = true;
  const ConvPass pass = asked == "wgrad"                        ? ConvPass::kWeight
                        : (asked == "fprop") == spec.transposed ? ConvPass::kBig
                                                                : ConvPass::kSmall;
  result.plan = find_route(*engine, problem, pass, facts).plan;
  result.tiles.assign(result.plan.pieces.begin() + (problem.lifted ? 1 : 0), result.plan.pieces.end());
  result.reason = result.plan.explanation(workspace_limit());
  result.kernel = engine->native_kernel(problem, pass, facts.dtype, facts.format);
  if (result.kernel) {
    result.tiles.assign(dims, 1);
    if (!problem.splits.empty()) {
      const int64_t first = problem.lifted ? 1 : 0;
      result.tiles.assign(problem.splits.begin() + first, problem.splits.end());
    }
    result.plan.batch_step = problem.batch;
    result.plan.tile_bytes = result.kernel.workspace;
    result.plan.halo_percent = 0;
    result.reason = backend() == Backend::kNative ? "backend 'native' asks for this project's kernels"
                                                  : "this project's kernel was measured to be faster here";
  }
  return result;
}

}  // namespace patchconv
