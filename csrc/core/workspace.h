// Another workspace limit for one thread, while the guard lives. A call that ran out of memory tries again
// with it.
#pragma once

#include <cstdint>
#include <optional>

namespace patchconv {

class WorkspaceGuard {
 public:
  explicit WorkspaceGuard(int64_t bytes);
  ~WorkspaceGuard();
  WorkspaceGuard(const WorkspaceGuard&) = delete;
  WorkspaceGuard& operator=(const WorkspaceGuard&) = delete;

 private:
  std::optional<int64_t> before_;
};

}  // namespace patchconv
