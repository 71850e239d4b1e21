#include "ops/explain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "core/settings.h"
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

// A tensor of this size, layout and dtype without memory.
Tensor stand_in(const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                const std::string& dtype) {
  const auto options = at::TensorOptions().device(at::kMeta).dtype(dtype_of(dtype));
  return stride.empty() ? at::empty(size, options) : at::empty_strided(size, stride, options);
}

}  // namespace

ConvExplanation explain_conv(const ConvQuestion& q) {
  const auto dims = static_cast<int>(q.weight.size()) - 2;
  TORCH_CHECK_VALUE(dims >= 1 && dims <= 3, "explain: expected weight to have 3, 4 or 5 dimensions, got ",
                    q.weight.size());
  at::OptionalIntArrayRef splits;
  if (q.splits.has_value()) splits = at::IntArrayRef(*q.splits);
  const ConvSpec spec{dims,       q.transposed, q.stride,       q.padding, q.output_padding,
                      q.dilation, q.groups,     q.padding_mode, splits};
  const ConvParams params = check_params(spec, spec.name());
  check_size(q.input);
  ConvExplanation result;
  result.output_size = check_sizes<int64_t>(params, q.input, q.weight);
  check_size(result.output_size);
  const ConvEngine* engine = find_engine(q.device);
  TORCH_CHECK_VALUE(engine != nullptr, "explain: expected device to be one this build serves, got ",
                    q.device);

  const Tensor input = stand_in(q.input, q.input_stride, q.dtype);
  const Tensor weight = stand_in(q.weight, q.weight_stride, q.weight_dtype);
  check_forward_tensors(params, input, weight, std::nullopt);
  const Lift lift{input.dim() == dims + 2, dims == 1};
  const Tensor in = lift(input);
  const Tensor w = lift.weight(weight);
  const Tensor batched = lift.batched ? input : input.unsqueeze(0);
  const ConvProblem problem = make_problem(params, batched.sizes(), weight.sizes());
  TensorFacts facts = tensor_facts(problem, in, w);
  if (q.pass != "fprop") {
    // The output's gradient is assumed to have the output's layout.
    const auto sizes = q.transposed ? problem.big_sizes(problem.batch) : problem.small_sizes(problem.batch);
    const Tensor grad = at::empty(sizes, in.options().memory_format(facts.format));
    facts = q.pass == "dgrad" ? tensor_facts(problem, grad, w) : tensor_facts(problem, {in, grad}, w);
  }
  facts.exact_bytes = true;
  const ConvPass pass = q.pass == "wgrad"                     ? ConvPass::kWeight
                        : (q.pass == "fprop") == q.transposed ? ConvPass::kBig
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
