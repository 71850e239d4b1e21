#include "memory/census.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace patchconv {

namespace {

using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// torch calls plain functions at the begin and end of every operator: they find the running census here.
std::mutex g_mutex;
std::shared_ptr<Census> g_census;
std::atomic<uint64_t> g_runs{0};

std::shared_ptr<Census> running() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return g_census;
}

// The operators that run on a thread. enter() starts a new count: a module's forward pass that runs inside a
// backward node has operators of its own.
struct Working {
  uint64_t run = 0;
  int64_t depth = 0;
  int64_t outermost = 0;
  std::vector<std::pair<int64_t, int64_t>> outside;
};

Working& working() {
  thread_local Working here;
  const uint64_t run = g_runs.load(std::memory_order_relaxed);
  if (here.run != run) here = Working{run, 0, 0, {}};
  return here;
}

int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

ProfilerConfig profiler_config(bool count) {
  // "Disabled": torch's own profiler counts as not running.
  return ProfilerConfig(ProfilerState::Disabled, /*report_input_shapes=*/false, /*profile_memory=*/!count);
}

}  // namespace

Census::Census(c10::Device device, bool count, bool keep)
    : ProfilerStateBase(profiler_config(count)), device_(device), count_(count), keep_(keep) {
  events_.names.emplace_back();
}

std::shared_ptr<Census> Census::start(c10::Device device, bool count, bool events) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (g_census) throw std::runtime_error("a memory trace is running already: only one can run at a time");
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) {
    throw std::runtime_error("torch.profiler is running on this thread: a memory trace cannot run inside it");
  }
  std::shared_ptr<Census> census(new Census(device, count, events));
  g_census = census;
  g_runs.fetch_add(1, std::memory_order_relaxed);
  census->began_ = count ? 0 : nanoseconds();
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, census);
  if (events) {
    census->setCallbackHandle(at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Census::begin, &Census::end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION})));
  }
  return census;
}

void Census::stop() {
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (g_census.get() != this) return;
    g_census.reset();
  }
  removeCallback();
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
}

std::unique_ptr<at::ObserverContext> Census::begin(const at::RecordFunction& function) {
  const auto census = running();
  if (!census) return nullptr;
  Working& here = working();
  const bool node = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  if (here.depth++ == 0 || node) {
    const std::lock_guard<std::mutex> lock(census->mutex_);
    here.outermost = census->number(function.name());
    if (census->count_) census->began_++;
  }
  if (node) census->add(CensusKind::kNode, function.seqNr(), 0);
  return nullptr;
}

void Census::end(const at::RecordFunction&, at::ObserverContext*) {
  Working& here = working();
  if (here.depth > 0 && --here.depth == 0) here.outermost = 0;
}

int64_t Census::number(const char* name) {
  constexpr const char* kEngine = "autograd::engine::evaluate_function: ";
  if (std::strncmp(name, kEngine, std::strlen(kEngine)) == 0) name += std::strlen(kEngine);
  const auto [place, fresh] = numbers_.emplace(name, static_cast<int64_t>(events_.names.size()));
  if (fresh) events_.names.emplace_back(name);
  return place->second;
}

void Census::add(CensusKind kind, int64_t bytes, int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.kind.push_back(static_cast<int64_t>(kind));
  events_.time.push_back(count_ ? began_ : nanoseconds() - began_);
  events_.bytes.push_back(bytes);
  events_.id.push_back(id);
  events_.op.push_back(working().outermost);
}

void Census::enter(int64_t id) {
  add(CensusKind::kEnter, static_cast<int64_t>(at::sequence_number::peek()), id);
  Working& here = working();
  here.outside.emplace_back(here.depth, here.outermost);
  here.depth = here.outermost = 0;
}

void Census::leave(int64_t id) {
  Working& here = working();
  if (!here.outside.empty()) {
    std::tie(here.depth, here.outermost) = here.outside.back();
    here.outside.pop_back();
  }
  add(CensusKind::kLeave, static_cast<int64_t>(at::sequence_number::peek()), id);
}

void Census::memory(int64_t block, int64_t bytes) { add(CensusKind::kMemory, bytes, block); }

std::string Census::operator_name() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_.names[working().outermost];
}

int64_t Census::peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return most_;
}

CensusEvents Census::events() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_;
}

void Census::reportMemoryUsage(void* block, int64_t bytes, size_t /*total*/, size_t /*reserved*/,
                               c10::Device device) {
  if (device.type() != device_.type() || (device.has_index() && device_.has_index() && device != device_))
    return;
  const auto id = static_cast<int64_t>(reinterpret_cast<uintptr_t>(block));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(id);
    // Of the CPU, what was there before: torch may give the size of an earlier block at this address.
    if (found == live_.end() && bytes < 0 && device.is_cpu()) return;
    now_ += bytes;
    if (found != live_.end()) {
      if (bytes > 0) now_ -= found->second;  // released by a thread that the census does not see
      live_.erase(found);
    }
    if (bytes > 0) live_.emplace(id, bytes);
    most_ = std::max(most_, now_);
  }
  if (keep_) add(CensusKind::kMemory, bytes, id);
}

void Census::reportOutOfMemory(int64_t bytes, size_t /*total*/, size_t /*reserved*/, c10::Device device) {
  if (device.type() == device_.type()) add(CensusKind::kRefused, bytes, 0);
}

}  // namespace patchconv
