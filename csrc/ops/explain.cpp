#include "ops/explain.h"

#include "core/settings.h"
#include "tiled/passes.h"

namespace patchconv {

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
  ConvExplanation result;
  result.output_size = check_sizes<int64_t>(params, q.input, q.weight);
  auto input = q.input;
  if (input.size() == q.weight.size() - 1) input.insert(input.begin(), 1);
  const ConvProblem problem = make_problem(params, input, q.weight);
  const ConvPass pass = q.pass == "wgrad"                     ? ConvPass::kWeight
                        : (q.pass == "fprop") == q.transposed ? ConvPass::kBig
                                                              : ConvPass::kSmall;
  const ConvEngine* engine = find_engine(q.device);
  TORCH_CHECK_VALUE(engine != nullptr, "explain: expected device to be one this build serves, got ",
                    q.device);
  const auto format = !q.channels_last || dims == 1 ? at::MemoryFormat::Contiguous
                      : dims == 2                   ? at::MemoryFormat::ChannelsLast
                                                    : at::MemoryFormat::ChannelsLast3d;
  result.plan = find_route(*engine, problem, pass, dtype_of(q.dtype), format, /*copied_bytes=*/0).plan;
  result.tiles.assign(result.plan.pieces.begin() + (problem.lifted ? 1 : 0), result.plan.pieces.end());
  result.reason = result.plan.explanation(workspace_limit());
  return result;
}

}  // namespace patchconv
