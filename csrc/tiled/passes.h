// The parts of one tile-by-tile pass; conv.cpp composes operators of passes.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "ops/optional.h"
#include "tiled/engine.h"

namespace patchconv {

// Stock operators called from a kernel must neither record gradients nor be cast by an enclosing autocast.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast{c10::autocast_dispatch_keyset};
};

// One member of every dimension: values(problem, &ConvDim::stride).
std::vector<int64_t> values(const ConvProblem& problem, int64_t ConvDim::* member);

at::Tensor bias_shaped(const at::Tensor& bias, int64_t dimensions);

// Counts what a pass did; the record is written when the pass is over.
class PathRecorder {
 public:
  PathRecorder(const ConvProblem& problem, ConvPass pass, const TilePlan& plan, const char* kernel = nullptr);
  void tile(bool view);
  void finish();

 private:
  PathRecord record_;
  std::atomic<int64_t> tiles_{0};  // from all threads
  std::atomic<int64_t> views_{0};
};

// How a pass is computed: along `plan`, and possibly as another problem that gives the same result.
struct Route {
  ConvProblem problem;
  ConvPass pass;
  TilePlan plan;
  bool flipped = false;  // takes flipped_weight() in place of the weight
};
Route find_route(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass,
                 const TensorFacts& facts);

// Facts of a pass that reads `sources` and, where it is given, `weight`. All are batched and 2-D or 3-D.
TensorFacts tensor_facts(const ConvProblem& problem, at::ArrayRef<at::Tensor> sources,
                         const OptionalTensor& weight);

// Batched 2-D or 3-D views of an operator's tensors, and the way back.
struct Lift {
  bool batched;
  bool lifted;

  std::vector<int64_t> batched_sizes(at::IntArrayRef sizes) const;
  at::Tensor operator()(const at::Tensor& tensor) const;
  at::Tensor weight(const at::Tensor& tensor) const;
  at::Tensor undo(const at::Tensor& tensor) const;
};

// (K, C/groups, R, S) to (C, K/groups, R, S), with every kernel flipped: with stride 1 a transposed
// convolution is a convolution with these.
at::Tensor flipped_weight(const ConvProblem& problem, const at::Tensor& weight);

// Write `small`, `big`: allocated, of full size. Return the weight's gradient in the tiles' dtype.
void tile_small(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan,
                const at::Tensor& big, const at::Tensor& weight, const OptionalTensor& bias,
                const at::Tensor& small);
void tile_big(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan,
              const at::Tensor& small, const at::Tensor& weight, const OptionalTensor& bias,
              const at::Tensor& big);
at::Tensor tile_weight(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan,
                       const at::Tensor& big, const at::Tensor& small);

}  // namespace patchconv
