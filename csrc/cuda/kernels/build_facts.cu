// Facts only nvcc knows: the toolkit it belongs to and the architectures it was told to compile for.
#include "cuda/kernels/build_facts.h"

#include <cuda_runtime_api.h>

namespace patchconv::kernels {

int compiled_runtime_version() { return CUDART_VERSION; }

std::string compiled_arch_list() {
  // nvcc defines the macro as a list of numbers: 800,900,1200.
  const int archs[] = {__CUDA_ARCH_LIST__};
  std::string text;
  for (int arch : archs) {
    text += (text.empty() ? "" : ";") + std::to_string(arch / 100) + "." + std::to_string(arch % 100 / 10);
  }
  return text;
}

}  // namespace patchconv::kernels
