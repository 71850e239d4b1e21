// A census of memory over one step: every allocation and every release that torch's allocators tell a
// profiler about, with the operator at work, between marks that the caller sets. It sees what is allocated
// inside of operators too (workspaces, oneDNN's reordered copies, cuDNN's workspace), and looks at one
// device.
//
// While it runs it takes the place of torch's profiler on this thread and on those that autograd hands its
// state to. Nothing but numbers is kept. Bytes that an allocator does not report are not seen: on the CPU
// those allocated before the census began, and what libraries take from malloc by themselves.
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
  kEnter,   // id: the caller's. bytes: the sequence number of the next autograd node
  kLeave,
  kNode,     // an autograd node begins. bytes: its sequence number, -1 if it has none
  kRefused,  // bytes: what could not be had
};

struct CensusEvents {  // one entry an event, in order
  std::vector<int64_t> kind, time, bytes, id, op;
  std::vector<std::string> names;  // of operators, by their numbers in `op`: 0 is none
};

class Census : public torch::profiler::impl::ProfilerStateBase {
 public:
  // `count`: time is the number of operators begun, and memory is told by allocate() and release() alone.
  // Else it is nanoseconds.
  static std::shared_ptr<Census> start(c10::Device device, bool count);  // one at a time: std::runtime_error
  void stop();

  void enter(int64_t id);
  void leave(int64_t id);
  void memory(int64_t block, int64_t bytes);
  std::string operator_name();  // the outermost one at work on this thread since the last enter()
  CensusEvents events();

  void reportMemoryUsage(void* block, int64_t bytes, size_t total, size_t reserved,
                         c10::Device device) override;
  void reportOutOfMemory(int64_t bytes, size_t total, size_t reserved, c10::Device device) override;
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

 private:
  Census(c10::Device device, bool count);
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function);
  static void end(const at::RecordFunction& function, at::ObserverContext* context);
  void add(CensusKind kind, int64_t bytes, int64_t id);
  int64_t number(const char* name);

  const c10::Device device_;
  const bool count_;
  std::mutex mutex_;
  int64_t began_ = 0;
  CensusEvents events_;
  std::unordered_map<std::string, int64_t> numbers_;
};

}  // namespace patchconv
