// What lanes of a warp do together: shuffles, votes, products of small matrices. Layouts are those of the
// manual's figures (PTX ISA, "Matrix fragments for mma.m16n8k16" and "...m16n8k8").
#include <algorithm>
#include <cmath>

#include "races.h"
#include "warp.h"

namespace ptx {

namespace {

// All lanes that the mask names must be here; the mask is the last operand.
void check_members(Warp& warp, const Instruction& instruction, uint32_t lanes, uint32_t mask_register) {
  each_lane(lanes, [&](int lane) {
    const auto mask = static_cast<uint32_t>(warp.lanes_of(mask_register)[lane]);
    if ((mask & warp.present()) != lanes) {
      throw Fault("lanes that are not there take part in: " + std::string(instruction.text));
    }
  });
}

enum class Shuffle { kButterfly, kDown, kUp, kIndex };

// result|valid, value, lane or distance, clamp and segments, members.
template <Shuffle kind>
void shuffle(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  const bool two = instruction.text.find('|') != std::string_view::npos;
  const size_t first = two ? 2 : 1;
  check_members(warp, instruction, lanes, r[first + 3]);
  uint64_t values[kLanes], results[kLanes];
  bool valid[kLanes];
  int source[kLanes];
  std::copy_n(warp.lanes_of(r[first]), kLanes, values);
  each_lane(lanes, [&](int lane) {
    const auto by = static_cast<int>(warp.lanes_of(r[first + 1])[lane] & 31);
    const auto clamp = static_cast<uint32_t>(warp.lanes_of(r[first + 2])[lane]);
    const int segment = static_cast<int>(clamp >> 8 & 31), most = static_cast<int>(clamp & 31);
    const int last = (lane & segment) | (most & ~segment), begin = lane & segment;
    int from = lane;
    if constexpr (kind == Shuffle::kButterfly) from = lane ^ by;
    if constexpr (kind == Shuffle::kDown) from = lane + by;
    if constexpr (kind == Shuffle::kUp) from = lane - by;
    if constexpr (kind == Shuffle::kIndex) from = begin | (by & ~segment);
    valid[lane] = kind == Shuffle::kUp ? from >= last : from <= last;
    if (!valid[lane]) from = lane;
    if ((lanes >> from & 1) == 0) throw Fault("a shuffle from a lane that is not there");
    results[lane] = values[from];
    source[lane] = from;
  });
  uint32_t undefined = 0;
  each_lane(lanes, [&](int lane) { undefined |= (warp.undefined(r[first]) >> source[lane] & 1) << lane; });
  each_lane(lanes, [&](int lane) {
    warp.lanes_of(r[0])[lane] = static_cast<uint32_t>(results[lane]);
    if (two) warp.lanes_of(r[1])[lane] = valid[lane] ? 1 : 0;
  });
  warp.set_undefined(r[0], lanes, undefined);
  if (two) warp.set_undefined(r[1], lanes, 0);
}

void ballot(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  check_members(warp, instruction, lanes, r[2]);
  uint32_t votes = 0;
  each_lane(lanes, [&](int lane) { votes |= static_cast<uint32_t>(warp.lanes_of(r[1])[lane] != 0) << lane; });
  each_lane(lanes, [&](int lane) { warp.lanes_of(r[0])[lane] = votes; });
  warp.set_undefined(r[0], lanes, (warp.undefined(r[1]) & lanes) != 0 ? kAllLanes : 0);
}

void warp_barrier(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  check_members(warp, instruction, lanes, instruction.registers[0]);
  host_cuda::races::after_warp_barrier(warp.number());
}

// A sum as tensor cores form it: the terms are moved to the largest one's exponent and cut to 24 bits, then
// added exactly, and the sum is cut, not rounded, to float32. (Volta does so; later ones keep a bit or two
// more. Less accurate than all of them.)
float sum_of(float c, const double* products, int count) {
  double terms[9];
  terms[0] = c;
  std::copy_n(products, count, terms + 1);
  double largest = 0;
  for (int i = 0; i <= count; ++i) {
    if (!std::isfinite(terms[i])) {
      double sum = 0;
      for (int j = 0; j <= count; ++j) sum += terms[j];
      return static_cast<float>(sum);
    }
    largest = std::max(largest, std::fabs(terms[i]));
  }
  if (largest == 0) return 0;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  double sum = 0;  // in units: whole numbers below 2^28
  for (int i = 0; i <= count; ++i) sum += std::trunc(terms[i] / unit);
  if (sum == 0) return 0;
  const double last = std::max(std::ldexp(1.0, std::ilogb(sum) - 23), 1.0);
  const auto result = static_cast<float>(std::trunc(sum / last) * last * unit);
  return result;
}

struct OfHalf {
  static constexpr int kEach = 2;
  static double value(uint32_t bits, int part) {
    return static_cast<double>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits >> (16 * part))));
  }
};
struct OfBFloat16 {
  static constexpr int kEach = 2;
  static double value(uint32_t bits, int part) { return std::bit_cast<float>(bits >> (16 * part) << 16); }
};
// The lower 13 bits are not read.
struct OfTf32 {
  static constexpr int kEach = 1;
  static double value(uint32_t bits, int) { return std::bit_cast<float>(bits & 0xffffe000U); }
};

// d (4 registers) = a (4) b (2) + c (4). With g = lane / 4 and t = lane % 4 and n numbers a register,
// register i of a holds row g + 8 (i % 2), columns n t + 4 n (i / 2) and on; register i of b rows n t + 4 n i
// and on of column g; register i of c and d row g + 8 (i / 2), column 2 t + i % 2.
template <typename Of>
void multiply(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAllLanes) throw Fault("a product of matrices by a part of a warp");
  constexpr int n = Of::kEach, kDepth = 8 * n, kStep = kDepth / 2;
  const auto& r = instruction.registers;
  double a[16][kDepth], b[8][kDepth];
  bool row_undefined[16] = {}, column_undefined[8] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int part = 0; part < n; ++part) {
      for (int i = 0; i < 4; ++i) {
        const uint32_t reg = r[static_cast<size_t>(4 + i)];
        const auto bits = static_cast<uint32_t>(warp.lanes_of(reg)[lane]);
        row_undefined[g + 8 * (i % 2)] |= (warp.undefined(reg) >> lane & 1) != 0;
        a[g + 8 * (i % 2)][n * t + 4 * n * (i / 2) + part] = Of::value(bits, part);
      }
      for (int i = 0; i < 2; ++i) {
        const uint32_t reg = r[static_cast<size_t>(8 + i)];
        const auto bits = static_cast<uint32_t>(warp.lanes_of(reg)[lane]);
        column_undefined[g] |= (warp.undefined(reg) >> lane & 1) != 0;
        b[g][n * t + 4 * n * i + part] = Of::value(bits, part);
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
      const uint32_t c = r[static_cast<size_t>(10 + i)], d = r[static_cast<size_t>(i)];
      auto sum = from_bits<float>(warp.lanes_of(c)[lane]);
      for (int k = 0; k < kDepth; k += kStep) {
        double products[kStep];
        for (int j = 0; j < kStep; ++j) products[j] = a[row][k + j] * b[column][k + j];
        sum = sum_of(sum, products, kStep);
      }
      const uint32_t undefined =
          warp.undefined(c) | (row_undefined[row] || column_undefined[column] ? kAllLanes : 0);
      warp.lanes_of(d)[lane] = to_bits(sum);
      warp.set_undefined(d, uint32_t{1} << lane, undefined);
    }
  }
}

void nothing(Warp&, const Instruction&, uint32_t) {}

}  // namespace

void add_exchanges(Operations& o) {
  o["shfl.sync.bfly.b32"] = own_operation(&shuffle<Shuffle::kButterfly>, 1, Flow::kTogether);
  o["shfl.sync.down.b32"] = own_operation(&shuffle<Shuffle::kDown>, 1, Flow::kTogether);
  o["shfl.sync.up.b32"] = own_operation(&shuffle<Shuffle::kUp>, 1, Flow::kTogether);
  o["shfl.sync.idx.b32"] = own_operation(&shuffle<Shuffle::kIndex>, 1, Flow::kTogether);
  o["vote.sync.ballot.b32"] = own_operation(&ballot, 1, Flow::kTogether);
  o["bar.warp.sync"] = own_operation(&warp_barrier, 0, Flow::kTogether);
  o["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] =
      own_operation(&multiply<OfHalf>, 4, Flow::kTogether);
  o["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] =
      own_operation(&multiply<OfBFloat16>, 4, Flow::kTogether);
  o["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] =
      own_operation(&multiply<OfTf32>, 4, Flow::kTogether);
  o["bar.sync"] = operation(&nothing, 0, Flow::kBarrier);
  o["bra"] = o["bra.uni"] = operation(&nothing, 0, Flow::kBranch);
  o["ret"] = o["exit"] = operation(&nothing, 0, Flow::kReturn);
}

}  // namespace ptx
