// Settings, and the record of how calls were computed. Plain C++: Python, TorchScript and C++ programs see
// the same values. A setting has a value for the process, and one for each thread that has set its own.
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
void set_workspace_limit(int64_t bytes);  // of the process; at least 1, else std::invalid_argument

// kAuto: the fastest exact way. kAten: tiles are cut, computed and joined by stock operators alone. kNative:
// as kAuto, and on CUDA also with those of this project's kernels that kAuto does not use yet.
enum class Backend { kAuto, kAten, kNative };
Backend backend();
const char* backend_name(Backend backend);
Backend parse_backend(
    const std::string& name);       // std::invalid_argument for a name that is unknown or not served
void set_backend(Backend backend);  // of the process

// Whether nodes keep a link to an input's producer instead of the input, where the producer can rebuild it.
bool recompute();
void set_recompute(bool on);  // of the process

// What a thread has set for itself; what it has not is the process's.
struct OwnSettings {
  std::optional<int64_t> workspace_limit;
  std::optional<Backend> backend;
  std::optional<bool> recompute;
};
const OwnSettings& own_settings();
void set_own_settings(const OwnSettings& own);  // the limit: at least 1, else std::invalid_argument

// While it lives, this thread has these settings as well as those it had. So backward computes as forward
// did, and a call that ran out of memory tries again with a lower limit.
class SettingsGuard {
 public:
  explicit SettingsGuard(const OwnSettings& more);
  ~SettingsGuard();
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  OwnSettings before_;
};

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
