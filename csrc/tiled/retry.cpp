#include "tiled/retry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <sstream>
#include <string>

#include "core/settings.h"

namespace patchconv {

namespace {

constexpr int64_t kLeastWorkspace = int64_t{64} << 10;

// Whether the exception that is being handled is lack of memory: CUDA's allocator throws a type of its own,
// the CPU's only a message.
bool out_of_memory() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::Error& error) {
    // what() would look up the names of all functions on the stack, which takes seconds.
    return std::string(error.what_without_backtrace()).find("can't allocate memory") != std::string::npos;
  } catch (...) {
    return false;
  }
}

// Takes four times as many pieces in the first dimension that can be cut further; false if none can.
bool cut_more(ConvProblem& problem) {
  for (size_t d = 0; d < problem.dims.size(); ++d) {
    const int64_t most = std::max(problem.dims[d].big, problem.dims[d].small);
    if (problem.splits[d] < most) {
      problem.splits[d] = std::min(most, problem.splits[d] * 4);
      return true;
    }
  }
  return false;
}

void warn_once(const ConvProblem& problem, int64_t limit) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  std::ostringstream how;
  if (problem.splits.empty()) {
    how << "with a workspace limit of " << limit << " bytes. To set it from the start: pc.workspace_limit("
        << limit << ")";
  } else {
    how << "with " << problem.splits[problem.lifted ? 1 : 0]
        << " pieces of the first dimension. To set it from the start: raise splits, or leave it None";
  }
  TORCH_WARN(problem.op, ": out of memory; computed again in more tiles, ", how.str(),
             ". This warning is shown once.");
}

}  // namespace

void with_more_tiles(const ConvProblem& problem, const std::function<void(const ConvProblem&)>& compute) {
  std::exception_ptr first;
  ConvProblem cut = problem;
  int64_t limit = workspace_limit();
  while (true) {
    try {
      if (!first) {
        compute(problem);
        return;
      }
      const SettingsGuard guard({.workspace_limit = limit});
      compute(cut);
      warn_once(cut, limit);
      return;
    } catch (...) {
      if (!out_of_memory()) throw;
      if (!first) first = std::current_exception();
    }
    const bool more = cut.splits.empty() ? limit > kLeastWorkspace : cut_more(cut);
    if (!more) std::rethrow_exception(first);
    limit = std::max(kLeastWorkspace, std::min(limit, kDefaultWorkspaceLimit) / 4);
  }
}

}  // namespace patchconv
