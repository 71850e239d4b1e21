// A census of memory over one step: every allocation and release that torch's allocators report to a
// profiler, with the operator that was running, between marks that the caller sets. It also sees what is
// allocated inside operators (workspaces, oneDNN's reordered copies, cuDNN's workspace). It covers one
// device.
//
// While it runs it takes the place of torch's profiler on this thread and on the threads that autograd passes
// its state to. It keeps numbers only, no tensors. It does not see what an allocator does not report: on the
// CPU, memory that was allocated before the census began, memory that libraries take from malloc themselves,
// and what other threads release (gloo's let go of a tensor last, now and then).
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace patchconv {

enum class CensusKind : int64_t {
  kMemory,  // bytes: allocated, or released if negative. id: the block's address
  kEnter,   // a mark with the caller's id. bytes: the sequence number of the next autograd node
  kLeave,
  kNode,     // an autograd node begins. bytes: its sequence number, -1 if it has none
  kRefused,  // an allocation failed. bytes: its size
};

struct CensusEvents {  // one entry per event, in order
  std::vector<int64_t> kind, time, bytes, id, op;
  std::vector<std::string> names;  // of operators, indexed by `op`; 0 is none
};

class Census : public torch::profiler::impl::ProfilerStateBase {
 public:
  // `count`: time is the number of operators that have begun, and memory() alone reports memory, as for fake
  // tensors. Else time is in nanoseconds and allocators report memory too. `events`: whether events are kept,
  // or the peak alone, whatever the number of allocations. std::runtime_error if one is running.
  static std::shared_ptr<Census> start(c10::Device device, bool count, bool events);
  void stop();

  void enter(int64_t id);
  void leave(int64_t id);
  void memory(int64_t block, int64_t bytes);  // an allocation, or a release if `bytes` is negative
  std::string operator_name();  // the outermost one that runs on this thread, since the last enter()
  CensusEvents events();
  int64_t peak();  // the most bytes that allocators have given out since the census began

  void reportMemoryUsage(void* block, int64_t bytes, size_t total, size_t reserved,
                         c10::Device device) override;
  void reportOutOfMemory(int64_t bytes, size_t total, size_t reserved, c10::Device device) override;
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

 private:
  Census(c10::Device device, bool count, bool keep);
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function);
  static void end(const at::RecordFunction& function, at::ObserverContext* context);
  void add(CensusKind kind, int64_t bytes, int64_t id);
  int64_t number(const char* name);

  const c10::Device device_;
  const bool count_, keep_;
  std::mutex mutex_;
  int64_t began_ = 0;
  CensusEvents events_;
  std::unordered_map<std::string, int64_t> numbers_;
  std::unordered_map<int64_t, int64_t> live_;  // bytes of the blocks that were allocated since it began
  int64_t now_ = 0, most_ = 0;
};

}  // namespace patchconv
