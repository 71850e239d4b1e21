// Registers with core/build_facts.h, while the library loads, that this build has a CUDA part and what it was
// compiled with.
#include "core/build_facts.h"

#include "cuda/kernels/build_facts.h"

namespace patchconv {
namespace {

[[maybe_unused]] const bool kRegistered =
    register_cuda_facts({kernels::compiled_runtime_version(), kernels::compiled_arch_list()});

}  // namespace
}  // namespace patchconv
