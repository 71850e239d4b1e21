#include "warp.h"

#include <algorithm>

#include "races.h"

namespace ptx {

namespace {

uint64_t special_value(const std::string& name, const host_cuda::Place& place, int thread) {
  if (name == "%tid.x") return static_cast<uint64_t>(thread);
  if (name == "%ntid.x") return static_cast<uint64_t>(place.threads);
  if (name == "%ctaid.x") return static_cast<uint64_t>(place.block_x);
  if (name == "%ctaid.y") return static_cast<uint64_t>(place.block_y);
  if (name == "%nctaid.x") return static_cast<uint64_t>(place.blocks_x);
  if (name == "%nctaid.y") return static_cast<uint64_t>(place.blocks_y);
  if (name == "%tid.y" || name == "%tid.z" || name == "%ctaid.z") return 0;
  throw Fault("no special register " + name);
}

}  // namespace

Warp::Warp(const Kernel& kernel, Block& block, int number, bool copies_at_once)
    : kernel_(kernel),
      block_(block),
      number_(number),
      place_(block.place),
      values_(size_t{kernel.registers} * kLanes, 0xa7a7a7a7a7a7a7a7),
      undefined_(kernel.registers, Parts{kAllLanes, kAllLanes, kAllLanes, kAllLanes}) {
  const int threads = std::min(kLanes, block.place.threads - number * kLanes);
  present_ = threads == kLanes ? kAllLanes : (uint32_t{1} << threads) - 1;
  copies_.assign(kLanes, host_cuda::Copies(copies_at_once));
  groups_.push_back({0, present_, false});
  const auto set = [&](uint32_t reg, uint64_t value) {
    std::fill_n(lanes_of(reg), kLanes, value);
    set_undefined(reg, kAllLanes, 0);
  };
  for (const auto& [reg, value] : kernel.constants) set(reg, value);
  for (const auto& [reg, offset] : kernel.addresses) {
    set(reg, reinterpret_cast<uint64_t>(block.parameters) + offset);
  }
  for (const auto& [reg, name] : kernel.special) {
    set_undefined(reg, kAllLanes, 0);
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes_of(reg)[lane] = special_value(name, block.place, number * kLanes + lane);
    }
  }
}

void Warp::speak_for(int lane) {
  place_.thread = number_ * kLanes + lane;
  host_cuda::set_here(&place_);
}

void Warp::check_defined(const Instruction& instruction, uint32_t reg, uint32_t lanes) {
  const uint32_t wrong = undefined(reg) & lanes;
  if (wrong == 0) return;
  speak_for(std::countr_zero(wrong));
  throw Fault("what nobody wrote is used: " + std::string(instruction.text));
}

void Warp::spread(const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  uint32_t from = 0;
  if (instruction.spread == Spread::kChosen) {
    for (int lane = 0; lane < kLanes; ++lane) {
      from |= undefined(lanes_of(r[3])[lane] != 0 ? r[1] : r[2]) & uint32_t{1} << lane;
    }
    from |= undefined(r[3]);
  } else {
    for (size_t i = instruction.results; i < r.size() && r[i] != kNone; ++i) from |= undefined(r[i]);
  }
  for (size_t i = 0; i < instruction.results; ++i) set_undefined(r[i], lanes, from);
}

// Makes the group that is furthest behind the running one, joined with all that are at the same instruction.
void Warp::pick() {
  const auto behind = [](const Group& a, const Group& b) {
    return std::pair(a.waits, a.at) < std::pair(b.waits, b.at);
  };
  std::iter_swap(std::min_element(groups_.begin(), groups_.end(), behind), groups_.end() - 1);
  Group first = groups_.back();
  for (size_t i = 0; i + 1 < groups_.size();) {
    if (groups_[i].at != first.at) {
      ++i;
      continue;
    }
    first.lanes |= groups_[i].lanes;
    groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (first.waits && first.lanes != present_) {
    throw Fault("lanes of a warp wait for others that do not come, at: " +
                std::string(kernel_.instructions[first.at].text));
  }
  first.waits = false;
  groups_.back() = first;
}

void Warp::branch(const Instruction& instruction, Group& group, uint32_t lanes) {
  const auto target = static_cast<size_t>(instruction.target);
  if (lanes == group.lanes) {
    group.at = target;
    return;
  }
  ++group.at;
  if (lanes == 0) return;
  group.lanes &= ~lanes;
  groups_.push_back({target, lanes, false});
}

bool Warp::run() {
  while (!groups_.empty()) {
    if (groups_.size() > 1) pick();
    Group& group = groups_.back();
    if (group.at >= kernel_.instructions.size()) throw Fault("a kernel without an end");
    const Instruction& instruction = kernel_.instructions[group.at];
    uint32_t lanes = group.lanes;
    if (instruction.predicate != kNone) {
      if (instruction.flow != Flow::kBranch) check_defined(instruction, instruction.predicate, lanes);
      const uint64_t* where = lanes_of(instruction.predicate);
      uint32_t chosen = 0;
      for (int lane = 0; lane < kLanes; ++lane) {
        chosen |= static_cast<uint32_t>((where[lane] != 0) == instruction.predicate_is) << lane;
      }
      lanes &= chosen;
    }
    const bool together = instruction.flow == Flow::kTogether || instruction.flow == Flow::kBarrier;
    if (together && lanes != group.lanes) throw Fault("some lanes skip: " + std::string(instruction.text));
    if (together && lanes != present_) {
      group.waits = true;
      if (groups_.size() == 1) pick();  // nobody else can come
      continue;
    }
    ++instruction.count.executed;
    switch (instruction.flow) {
      case Flow::kBranch:
        branch(instruction, group, lanes);
        break;
      case Flow::kReturn:
        group.lanes &= ~lanes;
        ++group.at;
        if (group.lanes == 0) groups_.pop_back();
        break;
      case Flow::kBarrier:
        ++group.at;
        return true;
      default:
        // Before it runs: a result may be a source too.
        if (lanes != 0 && instruction.spread != Spread::kOwn) spread(instruction, lanes);
        if (lanes != 0) instruction.execute(*this, instruction, lanes);
        ++group.at;
    }
  }
  for (const host_cuda::Copies& copies : copies_) {
    if (!copies.empty()) throw Fault("a thread ended with copies under way");
  }
  return false;
}

}  // namespace ptx
