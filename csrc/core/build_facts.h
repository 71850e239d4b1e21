// What this build is: facts that the CUDA part, where there is one, states about itself.
//
// Files under csrc/cuda/ are simply absent from a CPU-only build, so nothing outside may name them, not even
// behind an #ifdef. Instead they register here while the library loads, and cuda_facts() stays empty where
// nobody registered.
#pragma once

#include <optional>
#include <string>

namespace patchconv {

struct CudaFacts {
  int runtime_version;    // CUDART_VERSION of the toolkit that compiled the kernels, 13000 for CUDA 13.0
  std::string arch_list;  // the architectures nvcc generated code for, "8.0;9.0;12.0"
};

const std::optional<CudaFacts>& cuda_facts();

// Called once, by the CUDA part's static initialisation. The result exists to be assigned to a constant.
bool register_cuda_facts(CudaFacts facts);

}  // namespace patchconv
