// What the oneDNN in stock PyTorch can do on this processor.
#pragma once

#include <c10/core/ScalarType.h>

namespace patchconv {

// Whether it multiplies a half-precision dtype.
bool multiplies_half(c10::ScalarType dtype);

// Whether oneDNN has its kernels for AVX-512 here.
bool has_avx512();

// Whether the processor has tiles of matrices (AMX).
bool has_amx();

}  // namespace patchconv
