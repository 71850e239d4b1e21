// Facts about this build that its CUDA part, if there is one, registers.
//
// Files under csrc/cuda/ are absent from a CPU-only build, so no other file may refer to them, not even
// behind an #ifdef. They register their facts here while the library loads; cuda_facts() is empty if nothing
// was registered.
#pragma once

#include <optional>
#include <string>

namespace patchconv {

struct CudaFacts {
  int runtime_version;    // CUDART_VERSION of the toolkit that compiled the kernels, 13000 for CUDA 13.0
  std::string arch_list;  // the architectures nvcc generated code for, "8.0;9.0;12.0"
};

const std::optional<CudaFacts>& cuda_facts();

// Called once, during static initialisation of the CUDA part. Returns true, so that the call can initialise a
// constant.
bool register_cuda_facts(CudaFacts facts);

}  // namespace patchconv
