// What nvcc wrote for the kernels: PTX, read into instructions that machine.cpp executes for a whole warp.
//
// A register holds 64 bits for each of a warp's 32 lanes, whatever its type. Numbers that stand in the text
// and special registers such as %tid.x are registers too, which are filled before a warp starts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ptx {

class Warp;
struct Instruction;
// Executes an instruction for these lanes.
using Execute = void (*)(Warp&, const Instruction&, uint32_t lanes);

constexpr uint32_t kNone = UINT32_MAX;

enum class Flow : uint8_t { kNext, kBranch, kReturn, kBarrier, kTogether };  // kTogether: all lanes at once
// How lanes whose number nobody wrote spread from an instruction's sources to its results: from each of them,
// from the one that selp chooses, or as its function says.
enum class Spread : uint8_t { kEach, kChosen, kOwn };
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kParameters };

// What an instruction did, added up over all warps.
struct Count {
  int64_t executed = 0;       // by warps
  int64_t sectors = 0;        // of 32 bytes of global memory
  int64_t least_sectors = 0;  // that the same bytes could take
  int64_t wavefronts = 0;     // of shared memory
  int64_t least_wavefronts = 0;
};

struct Instruction {
  Execute execute = nullptr;
  Flow flow = Flow::kNext;
  Spread spread = Spread::kEach;
  Space space = Space::kGeneric;
  uint8_t width = 0;     // bytes of an element that a load or a store moves
  uint8_t elements = 1;  // how many of them
  bool is_signed = false;
  uint8_t results = 0;                          // how many of `registers`, from the first, are written
  uint32_t predicate = kNone;                   // it is executed where this register is ...
  bool predicate_is = true;                     // ... this
  uint32_t ignores = kNone;                     // a copy writes zeros where this predicate is true
  int32_t target = -1;                          // of a branch
  std::array<uint32_t, 14> registers = none();  // in the order of the text
  std::array<int64_t, 2> offsets{};             // of its addresses
  std::string_view name, text;
  mutable Count count;

  static std::array<uint32_t, 14> none() {
    std::array<uint32_t, 14> all{};
    all.fill(kNone);
    return all;
  }
};

struct Parameter {
  std::string name;
  size_t bytes, offset;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> instructions;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0;
  uint32_t registers = 0;
  std::vector<std::pair<uint32_t, uint64_t>> constants;   // registers and their values
  std::vector<std::pair<uint32_t, size_t>> addresses;     // of parameters: registers and offsets
  std::vector<std::pair<uint32_t, std::string>> special;  // registers and their names
};

// The kernels of the .ptx files of a folder. Names of unnamed namespaces are as the compiler of the host
// writes them.
class Library {
 public:
  explicit Library(const std::string& folder);
  // Reads it when it is asked for the first time. Throws std::runtime_error if there is none, or on an
  // instruction that is not known.
  const Kernel& kernel(const std::string& name);
  const std::map<std::string, std::unique_ptr<Kernel>>& kernels() const { return kernels_; }

 private:
  std::vector<std::string> texts_;
  std::map<std::string, std::string_view> entries_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

// How an instruction is executed, by its name (operations.cpp, memory.cpp, matrices.cpp). Sets everything but
// registers and target.
void set_operation(Instruction& instruction, std::string_view name);

// Makes multiply-adds of products and sums where ptxas may: it rounds once where the text rounds twice.
void contract(Kernel& kernel);

}  // namespace ptx
