// Holds the facts that the CUDA part of a build registers. The header says why this is a registry.
#include "core/build_facts.h"

#include <utility>

namespace patchconv {
namespace {

// A static local: other files register during their own static initialisation, whose order is not defined.
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
