// Runs kernels by what nvcc wrote for them, on the CPU.
#pragma once

#include <ostream>
#include <string>

namespace ptx {

// From now on launches run the .ptx files of this folder.
void run_from(const std::string& folder);

// What was executed, a line each: kernel, then each of its instructions with its counts (module.h) and text.
void write_counts(std::ostream& to);

}  // namespace ptx
