// A convolution that runs out of memory is computed again in more tiles.
//
// A failed try changes nothing: its tensors are freed. Only lack of memory is tried again, each time with a
// quarter of the workspace or, if splits were given, four times as many. When nothing more can be cut, the
// first error is thrown. The first success warns, once per process, and says what to set.
#pragma once

#include <functional>

#include "tiled/engine.h"

namespace patchconv {

void with_more_tiles(const ConvProblem& problem, const std::function<void(const ConvProblem&)>& compute);

}  // namespace patchconv
