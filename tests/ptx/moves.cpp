// mov: of a register, and between a register and its two halves.
#include "warp.h"

namespace ptx {

namespace {

template <typename T>
void move(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t to = instruction.registers[0], from = instruction.registers[1];
  each_lane(lanes,
            [&](int lane) { warp.lanes_of(to)[lane] = to_bits(from_bits<T>(warp.lanes_of(from)[lane])); });
  for (size_t part = 0; part < 4; ++part) warp.set_undefined(to, part, lanes, warp.undefined(from, part));
}

// How many pieces of 16 bits a half has.
template <typename Half>
constexpr size_t kParts = sizeof(Half) / 2;

template <typename Half>
void split(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  for (size_t half = 0; half < 2; ++half) {
    each_lane(lanes, [&](int lane) {
      warp.lanes_of(r[half])[lane] =
          static_cast<Half>(warp.lanes_of(r[2])[lane] >> (8 * sizeof(Half) * half));
    });
    warp.set_undefined(r[half], lanes, 0);
    for (size_t part = 0; part < kParts<Half>; ++part) {
      warp.set_undefined(r[half], part, lanes, warp.undefined(r[2], half * kParts<Half> + part));
    }
  }
}

template <typename Half>
void join(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  each_lane(lanes, [&](int lane) {
    const uint64_t low = static_cast<Half>(warp.lanes_of(r[1])[lane]),
                   high = static_cast<Half>(warp.lanes_of(r[2])[lane]);
    warp.lanes_of(r[0])[lane] = low | high << (8 * sizeof(Half));
  });
  warp.set_undefined(r[0], lanes, 0);
  for (size_t half = 0; half < 2; ++half) {
    for (size_t part = 0; part < kParts<Half>; ++part) {
      warp.set_undefined(r[0], half * kParts<Half> + part, lanes, warp.undefined(r[1 + half], part));
    }
  }
}

}  // namespace

void add_moves(Operations& o) {
  for (const std::string type : {"b16", "u16", "s16"}) o["mov." + type] = own_operation(&move<uint16_t>);
  for (const std::string type : {"b32", "u32", "s32", "f32"})
    o["mov." + type] = own_operation(&move<uint32_t>);
  for (const std::string type : {"b64", "u64", "s64", "f64"})
    o["mov." + type] = own_operation(&move<uint64_t>);
  o["mov.pred"] = own_operation(&move<bool>);
  o["mov.b32.split"] = own_operation(&split<uint16_t>, 2);
  o["mov.b64.split"] = own_operation(&split<uint32_t>, 2);
  o["mov.b32.join"] = own_operation(&join<uint16_t>);
  o["mov.b64.join"] = own_operation(&join<uint32_t>);
}

}  // namespace ptx
