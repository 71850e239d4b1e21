// A convolution that runs out of memory is computed again in more tiles.
//
// Nothing is changed by a try that failed: its tensors died with it. Only lack of memory is tried again, each
// time with a quarter of the workspace, or four times the splits where they were given; when no more can be
// cut the first error is thrown. The first success says once a process what to set.
#pragma once

#include <functional>

#include "tiled/conv.h"

namespace patchconv {

void with_more_tiles(const ConvProblem& problem, const std::function<void(const ConvProblem&)>& compute);

}  // namespace patchconv
