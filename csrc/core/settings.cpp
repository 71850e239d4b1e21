#include "core/settings.h"

#include "core/build_facts.h"
#include "core/workspace.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace patchconv {

namespace {

std::atomic<int64_t> g_workspace_limit{kDefaultWorkspaceLimit};
std::atomic<Backend> g_backend{Backend::kAuto};

thread_local std::optional<Backend> t_backend;
thread_local std::optional<int64_t> t_workspace_limit;

std::atomic<bool> g_recompute{true};

std::mutex g_path_mutex;
PathRecord g_last_path;
std::vector<std::vector<PathRecord>> g_path_logs;  // one per start_path_log() that was not stopped yet

}  // namespace

int64_t workspace_limit() {
  return t_workspace_limit ? *t_workspace_limit : g_workspace_limit.load(std::memory_order_relaxed);
}

WorkspaceGuard::WorkspaceGuard(int64_t bytes) : before_(t_workspace_limit) { t_workspace_limit = bytes; }
WorkspaceGuard::~WorkspaceGuard() { t_workspace_limit = before_; }

void set_workspace_limit(int64_t bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("workspace_limit: expected at least 1 byte, got " + std::to_string(bytes));
  }
  g_workspace_limit.store(bytes, std::memory_order_relaxed);
}

Backend backend() { return t_backend ? *t_backend : g_backend.load(std::memory_order_relaxed); }

BackendGuard::BackendGuard(Backend backend) : before_(t_backend) { t_backend = backend; }
BackendGuard::~BackendGuard() { t_backend = before_; }

std::string backend_name() {
  switch (backend()) {
    case Backend::kAten:
      return "aten";
    case Backend::kNative:
      return "native";
    default:
      return "auto";
  }
}

void set_backend(const std::string& name) {
  if (name == "auto") {
    g_backend = Backend::kAuto;
  } else if (name == "aten") {
    g_backend = Backend::kAten;
  } else if (name == "native") {
    if (!cuda_facts()) {
      throw std::invalid_argument(
          "backend: 'native' is not served: this build has no CUDA kernels; use 'auto' or 'aten'");
    }
    g_backend = Backend::kNative;
  } else {
    throw std::invalid_argument("backend: expected 'auto', 'aten' or 'native', got '" + name + "'");
  }
}

bool recompute() { return g_recompute.load(std::memory_order_relaxed); }

void set_recompute(bool on) { g_recompute.store(on, std::memory_order_relaxed); }

void record_path(const PathRecord& record) {
  const std::lock_guard<std::mutex> lock(g_path_mutex);
  g_last_path = record;
  for (auto& log : g_path_logs) log.push_back(record);
}

PathRecord last_path() {
  const std::lock_guard<std::mutex> lock(g_path_mutex);
  return g_last_path;
}

void start_path_log() {
  const std::lock_guard<std::mutex> lock(g_path_mutex);
  g_path_logs.emplace_back();
}

std::vector<PathRecord> stop_path_log() {
  const std::lock_guard<std::mutex> lock(g_path_mutex);
  if (g_path_logs.empty()) return {};
  auto log = std::move(g_path_logs.back());
  g_path_logs.pop_back();
  return log;
}

}  // namespace patchconv
