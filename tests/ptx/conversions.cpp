// cvt between numbers, cvta between address spaces.
#include <cfenv>
#include <cmath>
#include <limits>

#include "warp.h"

namespace ptx {

namespace {

template <typename To, typename From>
To truncated(From x) {
  constexpr bool kSmall = std::is_same_v<From, float> && sizeof(To) < 8;
  if (x != x) return kSmall ? To{0} : static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1));
  const auto least = static_cast<From>(std::numeric_limits<To>::min());
  const From past = std::ldexp(From{1}, std::numeric_limits<To>::digits);
  if (x < least) return std::numeric_limits<To>::min();
  return x >= past ? std::numeric_limits<To>::max() : static_cast<To>(x);
}

float from_half(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
uint16_t to_half(float x) {
  return x != x ? uint16_t{0x7fff} : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}
uint16_t to_bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x != x ? uint16_t{0x7fff} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// To nearest, ties away from zero.
uint32_t to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x != x ? 0x7fffffff : x - x != 0 ? bits : (bits + 0x1000U) & 0xffffe000U;
}
float saturated(float x) { return x > 0 ? std::fmin(x, 1.0F) : 0.0F; }

template <typename To, typename From>
void add_pair(Operations& o, const std::string& to, const std::string& from) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    o["cvt." + to + "." + from] = operation(&map<[](From x) { return static_cast<To>(x); }, To, From>);
  } else if constexpr (std::is_integral_v<From>) {
    o["cvt.rn." + to + "." + from] = operation(&map<[](From x) { return static_cast<To>(x); }, To, From>);
  } else if constexpr (std::is_integral_v<To>) {
    o["cvt.rzi." + to + "." + from] = operation(&map<truncated<To, From>, To, From>);
  }
}

template <typename To>
void add_to(Operations& o, const std::string& to) {
  add_pair<To, int8_t>(o, to, "s8");
  add_pair<To, uint8_t>(o, to, "u8");
  add_pair<To, int16_t>(o, to, "s16");
  add_pair<To, uint16_t>(o, to, "u16");
  add_pair<To, int32_t>(o, to, "s32");
  add_pair<To, uint32_t>(o, to, "u32");
  add_pair<To, int64_t>(o, to, "s64");
  add_pair<To, uint64_t>(o, to, "u64");
  add_pair<To, float>(o, to, "f32");
  add_pair<To, double>(o, to, "f64");
}

}  // namespace

void add_conversions(Operations& o) {
  add_to<int16_t>(o, "s16");
  add_to<uint16_t>(o, "u16");
  add_to<int32_t>(o, "s32");
  add_to<uint32_t>(o, "u32");
  add_to<int64_t>(o, "s64");
  add_to<uint64_t>(o, "u64");
  add_to<int8_t>(o, "s8");
  add_to<uint8_t>(o, "u8");
  add_to<float>(o, "f32");
  add_to<double>(o, "f64");
  o["cvt.f64.f32"] = operation(&map<[](float x) { return static_cast<double>(x); }, double, float>);
  o["cvt.rn.f32.f64"] = operation(&map<[](double x) { return static_cast<float>(x); }, float, double>);
  o["cvt.sat.f32.f32"] = operation(&map<saturated, float, float>);
  o["cvt.f32.f16"] = operation(&map<from_half, float, uint16_t>);
  o["cvt.rn.f16.f32"] = operation(&map<to_half, uint16_t, float>);
  o["cvt.rn.bf16.f32"] = operation(&map<to_bfloat16, uint16_t, float>);
  o["cvt.rn.f16x2.f32"] =
      operation(&map<[](float high, float low) { return to_half(low) | uint32_t{to_half(high)} << 16; },
                     uint32_t, float, float>);
  o["cvt.rn.bf16x2.f32"] = operation(
      &map<[](float high, float low) { return to_bfloat16(low) | uint32_t{to_bfloat16(high)} << 16; },
           uint32_t, float, float>);
  o["cvt.rna.tf32.f32"] = operation(&map<to_tf32, uint32_t, float>);
  // Generic addresses are those of global memory; shared memory is only used by addresses of its own.
  o["cvta.to.global.u64"] = operation(&map<[](uint64_t a) { return a; }, uint64_t, uint64_t>);
}

}  // namespace ptx
