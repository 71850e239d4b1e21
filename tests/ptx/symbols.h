// Names of this program's functions.
#pragma once

#include <string>

namespace ptx {

// The name of the function at this address, as the compiler wrote it. Throws std::runtime_error if there is
// none.
std::string symbol_at(const void* function);

}  // namespace ptx
