#include "core/settings.h"

#include "core/build_facts.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace patchconv {

namespace {

std::atomic<int64_t> g_workspace_limit{kDefaultWorkspaceLimit};
std::atomic<Backend> g_backend{Backend::kAuto};

std::atomic<bool> g_recompute{true};
thread_local OwnSettings t_own;

void check_workspace_limit(int64_t bytes) {
  if (bytes >= 1) return;
  throw std::invalid_argument("workspace_limit: expected at least 1 byte, got " + std::to_string(bytes));
}

std::mutex g_path_mutex;
PathRecord g_last_path;
std::vector<std::vector<PathRecord>> g_path_logs;  // one per start_path_log() that was not stopped yet

}  // namespace

int64_t workspace_limit() {
  return t_own.workspace_limit.value_or(g_workspace_limit.load(std::memory_order_relaxed));
}

void set_workspace_limit(int64_t bytes) {
  check_workspace_limit(bytes);
  g_workspace_limit.store(bytes, std::memory_order_relaxed);
}

Backend backend() { return t_own.backend.value_or(g_backend.load(std::memory_order_relaxed)); }

void set_backend(Backend backend) { g_backend = backend; }

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kAten:
      return "aten";
    case Backend::kNative:
      return "native";
    default:
      return "auto";
  }
}

Backend parse_backend(const std::string& name) {
  if (name == "auto") return Backend::kAuto;
  if (name == "aten") return Backend::kAten;
  if (name != "native") {
    throw std::invalid_argument("backend: expected 'auto', 'aten' or 'native', got '" + name + "'");
  }
  if (!cuda_facts()) {
    throw std::invalid_argument(
        "backend: 'native' is not served: this build has no CUDA kernels; use 'auto' or 'aten'");
  }
  return Backend::kNative;
}

bool recompute() { return t_own.recompute.value_or(g_recompute.load(std::memory_order_relaxed)); }

void set_recompute(bool on) { g_recompute.store(on, std::memory_order_relaxed); }

const OwnSettings& own_settings() { return t_own; }

void set_own_settings(const OwnSettings& own) {
  if (own.workspace_limit) check_workspace_limit(*own.workspace_limit);
  t_own = own;
}

SettingsGuard::SettingsGuard(const OwnSettings& more) : before_(t_own) {
  if (more.workspace_limit) t_own.workspace_limit = more.workspace_limit;
  if (more.backend) t_own.backend = more.backend;
  if (more.recompute) t_own.recompute = more.recompute;
}

SettingsGuard::~SettingsGuard() { t_own = before_; }

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
