// Process-wide settings, and the record of how calls were computed. Plain C++: Python, TorchScript and C++
// programs see the same values, also in backward passes on other threads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace patchconv {

// Automatic splits keep the transient memory of one call under this many bytes.
constexpr int64_t kDefaultWorkspaceLimit = int64_t{64} << 20;
int64_t workspace_limit();
void set_workspace_limit(int64_t bytes);  // at least 1, else std::invalid_argument

// kAuto: the fastest exact way. kAten: tiles are cut, computed and joined by stock operators alone. kNative:
// as kAuto, and on CUDA also with those of this project's kernels that kAuto does not use yet.
enum class Backend { kAuto, kAten, kNative };
Backend backend();
std::string backend_name();
void set_backend(const std::string& name);  // std::invalid_argument for a name that is unknown or not served
// While it lives, backend() returns this one on this thread. So a value is rebuilt with the backend that
// first computed it.
class BackendGuard {
 public:
  explicit BackendGuard(Backend backend);
  ~BackendGuard();
  BackendGuard(const BackendGuard&) = delete;
  BackendGuard& operator=(const BackendGuard&) = delete;

 private:
  std::optional<Backend> before_;
};

// Whether nodes keep a link to an input's producer instead of the input, where the producer can rebuild it.
bool recompute();
void set_recompute(bool on);

// How one pass of one operator was computed. Tests use it to assert that a call took the path they mean to
// test.
struct PathRecord {
  const char* op = "";           // "conv2d"
  const char* pass = "";         // "fprop", "dgrad" or "wgrad", in the operator's own terms
  bool tiled = false;            // false: one call of the stock operator
  const char* kernel = nullptr;  // this project's kernel, if it ran instead: then once per tile
  int dims = 0;
  std::array<int64_t, 3> pieces = {1, 1, 1};
  int64_t batch_step = 0;
  int64_t tiles = 0;  // tiles that were computed
  int64_t views = 0;  // tiles among them whose input was read in place, without a copy
};

void record_path(const PathRecord& record);
PathRecord last_path();
// Every record between start and stop is kept; stop returns them in order. Pairs may be nested.
void start_path_log();
std::vector<PathRecord> stop_path_log();

}  // namespace patchconv
