// Process-wide settings and the record of which path calls took. Plain C++: Python, TorchScript and C++
// programs all see the same values, and backward passes on other threads too.
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

// kAuto: whatever is fastest of what is exact. kAten: tiles are cut, computed and put together by stock
// operators alone. kNative: as kAuto, and on CUDA with those kernels of the project's own that are not yet
// what kAuto takes.
enum class Backend { kAuto, kAten, kNative };
Backend backend();
std::string backend_name();
void set_backend(const std::string& name);  // std::invalid_argument for an unknown or not served name
// On this thread, until it dies, backend() is this one: what is made again is made as it was.
class BackendGuard {
 public:
  explicit BackendGuard(Backend backend);
  ~BackendGuard();
  BackendGuard(const BackendGuard&) = delete;
  BackendGuard& operator=(const BackendGuard&) = delete;

 private:
  std::optional<Backend> before_;
};

// Whether nodes keep the way to an input's producer instead of the input, where it can be made again.
bool recompute();
void set_recompute(bool on);

// What one pass of one operator did. Tests assert with it that the path they mean to test was taken.
struct PathRecord {
  const char* op = "";           // "conv2d"
  const char* pass = "";         // "fprop", "dgrad" or "wgrad", in the operator's own terms
  bool tiled = false;            // false: one call of the stock operator
  const char* kernel = nullptr;  // the project's own that ran instead: then one a tile
  int dims = 0;
  std::array<int64_t, 3> pieces = {1, 1, 1};
  int64_t batch_step = 0;
  int64_t tiles = 0;  // tiles computed
  int64_t views = 0;  // of them, tiles whose input was read in place, without a copy
};

void record_path(const PathRecord& record);
PathRecord last_path();
// Between start and stop every record is kept; stop returns them in order. Pairs may be nested.
void start_path_log();
std::vector<PathRecord> stop_path_log();

}  // namespace patchconv
