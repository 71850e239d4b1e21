// The one place where the CUDA part of a build can leave its facts. See the header for why it is a registry.
#include "core/build_facts.h"

#include <utility>

namespace patchconv {
namespace {

// A function's static, because other files register during their own static initialisation, in no given
// order.
std::optional<CudaFacts>& slot() {
  static std::optional<CudaFacts> facts;
  return facts;
}

}  // namespace

const std::optional<CudaFacts>& cuda_facts() { return slot(); }

bool register_cuda_facts(CudaFacts facts) {
  slot() = std::move(facts);
  return true;
}

}  // namespace patchconv
