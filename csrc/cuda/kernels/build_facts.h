// Facts only nvcc knows, handed to host code as plain functions. No PyTorch header, no CUDA header.
#pragma once

#include <string>

namespace patchconv::kernels {

int compiled_runtime_version();    // CUDART_VERSION while compiling, 13000 for CUDA 13.0
std::string compiled_arch_list();  // "8.0;9.0;12.0": what nvcc generated code for

}  // namespace patchconv::kernels
