// Sums, products, comparisons, bits: everything that a lane does by itself to numbers of one type.
#include <cfenv>
#include <cmath>
#include <limits>

#include "warp.h"

namespace ptx {

namespace {

template <typename T, auto value, typename... Sources>
void add(Operations& operations, const std::string& name) {
  operations[name] = operation(&map<value, T, Sources...>);
}
template <typename T, auto value>
void unary(Operations& o, const std::string& name) {
  add<T, value, T>(o, name);
}
template <typename T, auto value>
void binary(Operations& o, const std::string& name) {
  add<T, value, T, T>(o, name);
}

template <typename T>
T divided(T a, T b) {
  if (b == 0) throw Fault("division by zero");
  if (std::is_signed_v<T> && b == static_cast<T>(-1))
    return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a));
  return static_cast<T>(a / b);
}

template <typename T, typename Wide>
T high_half(T a, T b) {
  return static_cast<T>((Wide{a} * b) >> (8 * sizeof(T)));
}

template <typename T>
T shifted_left(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by);
}
template <typename T>
T shifted_right(T a, uint32_t by) {
  constexpr uint32_t kLast = 8 * sizeof(T) - 1;
  if (by > kLast) return std::is_signed_v<T> ? static_cast<T>(a >> kLast) : T{0};
  return static_cast<T>(a >> by);
}

// Without rounding to nearest, exact fma is asked to round down.
float multiply_add_down(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float x = a, y = b, z = c;
  volatile float result = std::fma(x, y, z);
  std::fesetround(before);
  return result;
}

// The manual allows a relative error of 2^-22; here it is the largest, up or down by the argument's last bit.
float exp2_approximately(float x) {
  const double exact = std::exp2(static_cast<double>(x));
  const double error = (std::bit_cast<uint32_t>(x) & 1) != 0 ? 0x1p-22 : -0x1p-22;
  const auto result = static_cast<float>(x == 0 ? exact : exact * (1 + error));
  return std::fpclassify(result) == FP_SUBNORMAL ? 0.0F : result;
}

template <typename T>
void add_comparisons(Operations& o, const std::string& type) {
  const std::string end = "." + type;
  add<bool, [](T a, T b) { return a == b; }, T, T>(o, "setp.eq" + end);
  if constexpr (std::is_floating_point_v<T>) {
    add<bool, [](T a, T b) { return !(a != a) && !(b != b) && a != b; }, T, T>(o, "setp.ne" + end);
    add<bool, [](T a, T b) { return a != b; }, T, T>(o, "setp.neu" + end);
    add<bool, [](T a, T b) { return a != a || b != b || a == b; }, T, T>(o, "setp.equ" + end);
    add<bool, [](T a, T b) { return !(a >= b); }, T, T>(o, "setp.ltu" + end);
    add<bool, [](T a, T b) { return !(a > b); }, T, T>(o, "setp.leu" + end);
    add<bool, [](T a, T b) { return !(a <= b); }, T, T>(o, "setp.gtu" + end);
    add<bool, [](T a, T b) { return !(a < b); }, T, T>(o, "setp.geu" + end);
    add<bool, [](T a, T b) { return a != a || b != b; }, T, T>(o, "setp.nan" + end);
    add<bool, [](T a, T b) { return a == a && b == b; }, T, T>(o, "setp.num" + end);
  } else {
    add<bool, [](T a, T b) { return a != b; }, T, T>(o, "setp.ne" + end);
  }
  add<bool, [](T a, T b) { return a < b; }, T, T>(o, "setp.lt" + end);
  add<bool, [](T a, T b) { return a <= b; }, T, T>(o, "setp.le" + end);
  add<bool, [](T a, T b) { return b < a; }, T, T>(o, "setp.gt" + end);
  add<bool, [](T a, T b) { return a >= b; }, T, T>(o, "setp.ge" + end);
}

template <typename T>
void add_integers(Operations& o, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  const std::string end = "." + type;
  binary<U, [](U a, U b) { return a + b; }>(o, "add" + end);
  binary<U, [](U a, U b) { return a - b; }>(o, "sub" + end);
  binary<U, [](U a, U b) { return uint64_t{a} * b; }>(o, "mul.lo" + end);
  add<U, [](U a, U b, U c) { return uint64_t{a} * b + c; }, U, U, U>(o, "mad.lo" + end);
  binary<T, [](T a, T b) { return divided(a, b); }>(o, "div" + end);
  binary<T, [](T a, T b) { return static_cast<U>(a) - static_cast<U>(divided(a, b)) * static_cast<U>(b); }>(
      o, "rem" + end);
  binary<T, [](T a, T b) { return a < b ? a : b; }>(o, "min" + end);
  binary<T, [](T a, T b) { return b < a ? a : b; }>(o, "max" + end);
  unary<U, [](U a) { return 0 - a; }>(o, "neg" + end);
  add<T, [](T a, uint32_t by) { return shifted_right(a, by); }, T, uint32_t>(o, "shr" + end);
  add_comparisons<T>(o, type);
  if constexpr (sizeof(T) <= 4) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    using Twice =
        std::conditional_t<sizeof(T) == 4, Wide, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;
    add<Twice, [](T a, T b) { return Wide{a} * b; }, T, T>(o, "mul.wide" + end);
    add<Twice,
        [](T a, T b, Twice c) { return static_cast<uint64_t>(Wide{a} * b) + static_cast<uint64_t>(c); }, T, T,
        Twice>(o, "mad.wide" + end);
    binary<T, high_half<T, Wide>>(o, "mul.hi" + end);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    binary<T, high_half<T, Wide>>(o, "mul.hi" + end);
  }
}

template <typename T>
void add_bits(Operations& o, const std::string& type) {
  const std::string end = "." + type;
  binary<T, [](T a, T b) { return a & b; }>(o, "and" + end);
  binary<T, [](T a, T b) { return a | b; }>(o, "or" + end);
  binary<T, [](T a, T b) { return a ^ b; }>(o, "xor" + end);
  if constexpr (std::is_same_v<T, bool>) {
    unary<T, [](T a) { return !a; }>(o, "not" + end);
  } else {
    unary<T, [](T a) { return static_cast<T>(~a); }>(o, "not" + end);
    add<T, [](T a, uint32_t by) { return shifted_left(a, by); }, T, uint32_t>(o, "shl" + end);
    add<T, [](T a, uint32_t by) { return shifted_right(a, by); }, T, uint32_t>(o, "shr" + end);
    add<bool, [](T a, T b) { return a == b; }, T, T>(o, "setp.eq" + end);
    add<bool, [](T a, T b) { return a != b; }, T, T>(o, "setp.ne" + end);
  }
}

// Of zeros, the one with a sign; of a number and NaN, the number.
template <typename T>
T smaller(T a, T b) {
  if (a == b) return std::signbit(a) ? a : b;
  return std::fmin(a, b);
}

template <typename T>
void add_floats(Operations& o, const std::string& type) {
  const std::string end = "." + type;
  for (const std::string rounded : {"", ".rn"}) {
    binary<T, [](T a, T b) { return a + b; }>(o, "add" + rounded + end);
    binary<T, [](T a, T b) { return a - b; }>(o, "sub" + rounded + end);
    binary<T, [](T a, T b) { return a * b; }>(o, "mul" + rounded + end);
  }
  add<T, [](T a, T b, T c) { return std::fma(a, b, c); }, T, T, T>(o, "fma.rn" + end);
  // What contract() makes of a product and a difference.
  add<T, [](T a, T b, T c) { return std::fma(a, b, -c); }, T, T, T>(o, "fma.minus" + end);
  add<T, [](T a, T b, T c) { return std::fma(-a, b, c); }, T, T, T>(o, "fma.from" + end);
  binary<T, [](T a, T b) { return a / b; }>(o, "div.rn" + end);
  unary<T, [](T a) { return 1 / a; }>(o, "rcp.rn" + end);
  unary<T, [](T a) { return std::sqrt(a); }>(o, "sqrt.rn" + end);
  unary<T, [](T a) { return -a; }>(o, "neg" + end);
  unary<T, [](T a) { return std::fabs(a); }>(o, "abs" + end);
  binary<T, [](T a, T b) { return smaller(a, b); }>(o, "min" + end);
  binary<T, [](T a, T b) { return -smaller(-a, -b); }>(o, "max" + end);
  binary<T, [](T a, T b) { return a != a ? a : b != b ? b : -smaller(-a, -b); }>(o, "max.NaN" + end);
  add_comparisons<T>(o, type);
}

template <typename T>
void add_choice(Operations& o, const std::string& type) {
  add<T, [](T a, T b, bool first) { return first ? a : b; }, T, T, bool>(o, "selp." + type);
  o["selp." + type].spread = Spread::kChosen;
}

uint32_t inserted(uint32_t bits, uint32_t into, uint32_t at, uint32_t count) {
  at &= 255;
  count &= 255;
  for (uint32_t i = 0; i < count && at + i < 32; ++i) {
    const uint32_t one = uint32_t{1} << (at + i);
    into = (bits >> i & 1) != 0 ? into | one : into & ~one;
  }
  return into;
}

}  // namespace

void add_arithmetic(Operations& o) {
  add_integers<int16_t>(o, "s16");
  add_integers<uint16_t>(o, "u16");
  add_integers<int32_t>(o, "s32");
  add_integers<uint32_t>(o, "u32");
  add_integers<int64_t>(o, "s64");
  add_integers<uint64_t>(o, "u64");
  add_bits<bool>(o, "pred");
  add_bits<uint16_t>(o, "b16");
  add_bits<uint32_t>(o, "b32");
  add_bits<uint64_t>(o, "b64");
  add_floats<float>(o, "f32");
  add_floats<double>(o, "f64");
  for (const std::string type : {"b16", "u16", "s16"}) add_choice<uint16_t>(o, type);
  for (const std::string type : {"b32", "u32", "s32", "f32"}) add_choice<uint32_t>(o, type);
  for (const std::string type : {"b64", "u64", "s64", "f64"}) add_choice<uint64_t>(o, type);
  add_choice<bool>(o, "pred");
  add<float, multiply_add_down, float, float, float>(o, "fma.rm.f32");
  add<float, exp2_approximately, float>(o, "ex2.approx.ftz.f32");
  add<uint32_t, inserted, uint32_t, uint32_t, uint32_t, uint32_t>(o, "bfi.b32");
}

}  // namespace ptx
