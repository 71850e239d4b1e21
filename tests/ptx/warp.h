// A warp that runs a kernel, as operations see it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "copies.h"
#include "executor.h"
#include "module.h"

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = UINT32_MAX;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The lanes of a warp that are at the same instruction.
struct Group {
  size_t at;
  uint32_t lanes;
  bool waits;  // for the other lanes
};

// What a block's warps share.
struct Block {
  host_cuda::Place place;
  const unsigned char* parameters = nullptr;
  unsigned char* shared = nullptr;
  std::vector<bool> written;  // the bytes of shared memory
};

class Warp {
 public:
  Warp(const Kernel& kernel, Block& block, int number, bool copies_at_once);

  // Runs until all lanes are at a barrier of the block (true) or at the end (false).
  bool run();

  uint64_t* lanes_of(uint32_t reg) { return values_.data() + size_t{reg} * kLanes; }
  // The lanes for which the register holds what nobody wrote: memory or another register that was read before
  // it was written. A kernel may compute with it, and does where nothing is stored; it may not be stored to
  // global memory, nor be an address.
  // Known for each 16 bits of it, since nvcc loads several numbers at once.
  uint32_t undefined(uint32_t reg, size_t part) const { return undefined_[reg][part]; }
  uint32_t undefined(uint32_t reg) const {
    const Parts& parts = undefined_[reg];
    return parts[0] | parts[1] | parts[2] | parts[3];
  }
  void set_undefined(uint32_t reg, size_t part, uint32_t lanes, uint32_t which) {
    undefined_[reg][part] = (undefined_[reg][part] & ~lanes) | (which & lanes);
  }
  void set_undefined(uint32_t reg, uint32_t lanes, uint32_t which) {
    for (size_t part = 0; part < 4; ++part) set_undefined(reg, part, lanes, which);
  }
  void check_defined(const Instruction& instruction, uint32_t reg, uint32_t lanes);
  Block& block() { return block_; }
  int number() const { return number_; }
  uint32_t present() const { return present_; }
  host_cuda::Copies& copies(int lane) { return copies_[static_cast<size_t>(lane)]; }
  // Accesses are this lane's until the next call, for faults and for races.
  void speak_for(int lane);

 private:
  void branch(const Instruction& instruction, Group& group, uint32_t lanes);
  void spread(const Instruction& instruction, uint32_t lanes);
  void pick();

  const Kernel& kernel_;
  Block& block_;
  int number_;
  uint32_t present_;
  host_cuda::Place place_;
  std::vector<uint64_t> values_;
  using Parts = std::array<uint32_t, 4>;
  std::vector<Parts> undefined_;
  std::vector<Group> groups_;  // the last one is running
  std::vector<host_cuda::Copies> copies_;
};

template <typename T>
T from_bits(uint64_t bits) {
  if constexpr (std::is_same_v<T, bool>) {
    return bits != 0;
  } else if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits));
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<double>(bits);
  } else {
    return static_cast<T>(bits);
  }
}

template <typename T>
uint64_t to_bits(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? 1 : 0;
  } else if constexpr (std::is_same_v<T, float>) {
    return value != value ? 0x7fffffff : std::bit_cast<uint32_t>(value);  // the NaN that a GPU makes
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<uint64_t>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <typename Use>
void each_lane(uint32_t lanes, const Use& use) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) use(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) use(std::countr_zero(lanes));
  }
}

// The first register gets `value` of the others.
template <auto value, typename Result, typename... Sources>
void map(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* result = warp.lanes_of(instruction.registers[0]);
  [&]<size_t... i>(std::index_sequence<i...>) {
    const uint64_t* sources[] = {warp.lanes_of(instruction.registers[i + 1])...};
    each_lane(lanes, [&](int lane) {
      result[lane] = to_bits<Result>(static_cast<Result>(value(from_bits<Sources>(sources[i][lane])...)));
    });
  }(std::index_sequence_for<Sources...>());
}

// Operations by their names, added by one file each.
using Operations = std::map<std::string, Instruction, std::less<>>;
void add_arithmetic(Operations& operations);
void add_conversions(Operations& operations);
void add_moves(Operations& operations);
void add_exchanges(Operations& operations);
void add_memory(Operations& operations);

inline Instruction operation(Execute execute, uint8_t results = 1, Flow flow = Flow::kNext) {
  Instruction instruction;
  instruction.execute = execute;
  instruction.results = results;
  instruction.flow = flow;
  return instruction;
}

// The same, of one that says itself which results nobody wrote.
inline Instruction own_operation(Execute execute, uint8_t results = 1, Flow flow = Flow::kNext) {
  Instruction instruction = operation(execute, results, flow);
  instruction.spread = Spread::kOwn;
  return instruction;
}

}  // namespace ptx
