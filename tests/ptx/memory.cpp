// Loads, stores, asynchronous copies and ldmatrix. Every access is checked: it must be aligned to its size
// and lie in memory that is there; shared memory must have been written before it is read.
#include <algorithm>
#include <set>

#include "races.h"
#include "warp.h"

// Of the address sanitizer, if it is linked.
extern "C" void* __asan_region_is_poisoned(void* begin, size_t bytes) __attribute__((weak));

namespace ptx {

namespace {

[[noreturn]] void refuse(const Instruction& instruction, const char* why, uint64_t address) {
  throw Fault(std::string(why) + " (" + std::to_string(address) + "): " + std::string(instruction.text));
}

void check_aligned(const Instruction& instruction, uint64_t address, size_t bytes) {
  if (address % bytes != 0) refuse(instruction, "an address that is not aligned", address);
}

unsigned char* global_memory(const Instruction& instruction, uint64_t address, size_t bytes) {
  auto* at = reinterpret_cast<unsigned char*>(address);
  if (address < 4096 ||
      (__asan_region_is_poisoned != nullptr && __asan_region_is_poisoned(at, bytes) != nullptr)) {
    refuse(instruction, "an address outside of any buffer", address);
  }
  return at;
}

unsigned char* shared_memory(Warp& warp, const Instruction& instruction, uint64_t address, size_t bytes) {
  if (address + bytes > warp.block().written.size()) {
    refuse(instruction, "an address outside of shared memory", address);
  }
  return warp.block().shared + address;
}

unsigned char* place_of(Warp& warp, const Instruction& instruction, uint64_t address, bool write) {
  const size_t bytes = size_t{instruction.width} * instruction.elements;
  check_aligned(instruction, address, bytes);
  if (instruction.space != Space::kShared) return global_memory(instruction, address, bytes);
  unsigned char* at = shared_memory(warp, instruction, address, bytes);
  if (write) {
    host_cuda::races::write(at, bytes);
  } else {
    host_cuda::races::read(at, bytes);
  }
  return at;
}

// Adds up what the lanes' accesses at these addresses cost.
void count_global(const Instruction& instruction, const uint64_t* addresses, uint32_t lanes, size_t bytes) {
  uint64_t sectors[2 * kLanes], distinct[kLanes];
  size_t count = 0, different = 0;
  each_lane(lanes, [&](int lane) {
    distinct[different++] = addresses[lane];
    for (uint64_t sector = addresses[lane] / 32; sector <= (addresses[lane] + bytes - 1) / 32; ++sector) {
      sectors[count++] = sector;
    }
  });
  std::sort(sectors, sectors + count);
  std::sort(distinct, distinct + different);
  instruction.count.sectors += std::unique(sectors, sectors + count) - sectors;
  const auto distinct_bytes =
      bytes * static_cast<size_t>(std::unique(distinct, distinct + different) - distinct);
  instruction.count.least_sectors += static_cast<int64_t>((distinct_bytes + 31) / 32);
}

// 32 banks of 4 bytes serve 128 bytes at once: all lanes' words, half of the lanes' pairs or a quarter of the
// lanes' 16 bytes. Different words in one bank come one after another.
void count_shared(const Instruction& instruction, const uint64_t* addresses, uint32_t lanes, size_t bytes) {
  const int together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  for (int first = 0; first < kLanes; first += together) {
    std::set<uint64_t> words[32];
    for (int lane = first; lane < first + together; ++lane) {
      if ((lanes >> lane & 1) == 0) continue;
      for (size_t byte = 0; byte < bytes; byte += 4) {
        const uint64_t word = (addresses[lane] + byte) / 4;
        words[word % 32].insert(word);
      }
    }
    size_t most = 0, all = 0;
    for (const auto& bank : words) {
      most = std::max(most, bank.size());
      all += bank.size();
    }
    instruction.count.wavefronts += static_cast<int64_t>(most);
    instruction.count.least_wavefronts += static_cast<int64_t>((all + 31) / 32);
  }
}

void count(const Instruction& instruction, const uint64_t* addresses, uint32_t lanes, size_t bytes) {
  if (instruction.space == Space::kShared) count_shared(instruction, addresses, lanes, bytes);
  if (instruction.space == Space::kGlobal || instruction.space == Space::kGeneric) {
    count_global(instruction, addresses, lanes, bytes);
  }
}

uint64_t element(const unsigned char* at, const Instruction& instruction) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, instruction.width);
  const int unused = 64 - 8 * instruction.width;
  if (!instruction.is_signed || unused == 0) return bits;
  return static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
}

// Whether all these bytes of shared memory were written, and not by what nobody wrote.
bool written(Warp& warp, uint64_t address, size_t bytes) {
  const auto begin = warp.block().written.begin() + static_cast<std::ptrdiff_t>(address);
  return std::find(begin, begin + static_cast<std::ptrdiff_t>(bytes), false) ==
         begin + static_cast<std::ptrdiff_t>(bytes);
}

// Which 16 bits of a register, loaded from shared memory, nobody wrote.
void note_undefined(Warp& warp, uint32_t reg, int lane, uint64_t address, size_t bytes) {
  for (size_t part = 0; 2 * part < bytes; ++part) {
    const bool defined = written(warp, address + 2 * part, std::min<size_t>(2, bytes));
    warp.set_undefined(reg, part, uint32_t{1} << lane, defined ? 0 : kAllLanes);
  }
}

// One to four results, then the address.
void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  uint64_t addresses[kLanes];
  const uint64_t* base = warp.lanes_of(r[instruction.elements]);
  warp.check_defined(instruction, r[instruction.elements], lanes);
  each_lane(lanes,
            [&](int lane) { addresses[lane] = base[lane] + static_cast<uint64_t>(instruction.offsets[0]); });
  each_lane(lanes, [&](int lane) {
    warp.speak_for(lane);
    const unsigned char* at = instruction.space == Space::kParameters
                                  ? reinterpret_cast<const unsigned char*>(addresses[lane])
                                  : place_of(warp, instruction, addresses[lane], /*write=*/false);
    for (size_t i = 0; i < instruction.elements; ++i) {
      warp.lanes_of(r[i])[lane] = element(at + i * instruction.width, instruction);
      warp.set_undefined(r[i], uint32_t{1} << lane, 0);
      if (instruction.space == Space::kShared)
        note_undefined(warp, r[i], lane, addresses[lane] + i * instruction.width, instruction.width);
    }
  });
  count(instruction, addresses, lanes, size_t{instruction.width} * instruction.elements);
}

// The address, then one to four values.
void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  uint64_t addresses[kLanes];
  const uint64_t* base = warp.lanes_of(r[0]);
  warp.check_defined(instruction, r[0], lanes);
  for (size_t i = 0; i < instruction.elements && instruction.space != Space::kShared; ++i) {
    warp.check_defined(instruction, r[1 + i], lanes);
  }
  each_lane(lanes, [&](int lane) {
    addresses[lane] = base[lane] + static_cast<uint64_t>(instruction.offsets[0]);
    warp.speak_for(lane);
    unsigned char* at = place_of(warp, instruction, addresses[lane], /*write=*/true);
    for (size_t i = 0; i < instruction.elements; ++i) {
      std::memcpy(at + i * instruction.width, &warp.lanes_of(r[1 + i])[lane], instruction.width);
      if (instruction.space != Space::kShared) continue;
      const auto first =
          warp.block().written.begin() + static_cast<std::ptrdiff_t>(addresses[lane] + i * instruction.width);
      for (size_t byte = 0; byte < instruction.width; ++byte) {
        first[static_cast<std::ptrdiff_t>(byte)] = (warp.undefined(r[1 + i], byte / 2) >> lane & 1) == 0;
      }
    }
  });
  count(instruction, addresses, lanes, size_t{instruction.width} * instruction.elements);
}

// 16 or 4 bytes to shared memory, from global memory, of which only the first few are read.
void copy(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& r = instruction.registers;
  const size_t bytes = instruction.width;
  uint64_t to[kLanes], from[kLanes];
  uint32_t reading = 0;
  for (size_t i = 0; i < 4 && r[i] != kNone; ++i) warp.check_defined(instruction, r[i], lanes);
  if (instruction.ignores != kNone) warp.check_defined(instruction, instruction.ignores, lanes);
  each_lane(lanes, [&](int lane) {
    warp.speak_for(lane);
    to[lane] = warp.lanes_of(r[0])[lane] + static_cast<uint64_t>(instruction.offsets[0]);
    from[lane] = warp.lanes_of(r[1])[lane] + static_cast<uint64_t>(instruction.offsets[1]);
    size_t filled = r[3] == kNone ? bytes : static_cast<uint32_t>(warp.lanes_of(r[3])[lane]);
    if (instruction.ignores != kNone && warp.lanes_of(instruction.ignores)[lane] != 0) filled = 0;
    if (filled > bytes) refuse(instruction, "more bytes than the copy has", filled);
    check_aligned(instruction, to[lane], bytes);
    check_aligned(instruction, from[lane], bytes);
    const unsigned char* source = nullptr;
    if (filled > 0) {
      source = global_memory(instruction, from[lane], filled);
      reading |= uint32_t{1} << lane;
    }
    unsigned char* target = shared_memory(warp, instruction, to[lane], bytes);
    std::fill_n(warp.block().written.begin() + static_cast<std::ptrdiff_t>(to[lane]), bytes, true);
    warp.copies(lane).start(target, source, bytes, filled);
  });
  count_global(instruction, from, reading, bytes);
  count_shared(instruction, to, lanes, bytes);
}

void commit(Warp& warp, const Instruction&, uint32_t lanes) {
  each_lane(lanes, [&](int lane) { warp.copies(lane).end_group(); });
}

void wait(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  each_lane(lanes, [&](int lane) {
    warp.speak_for(lane);
    warp.copies(lane).finish(static_cast<size_t>(warp.lanes_of(instruction.registers[0])[lane]));
  });
}

// Four matrices of 8 x 8 numbers of 16 bits: lane 8 m + i gives the address of row i of matrix m. Lane l gets
// numbers 2 (l % 4) and the next of row l / 4; transposed, of column l / 4.
template <bool kTransposed>
void load_matrices(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAllLanes) throw Fault("ldmatrix by a part of a warp");
  const auto& r = instruction.registers;
  uint16_t rows[kLanes][8];
  uint64_t addresses[kLanes];
  bool defined[kLanes][8];
  warp.check_defined(instruction, r[4], lanes);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.speak_for(lane);
    addresses[lane] = warp.lanes_of(r[4])[lane] + static_cast<uint64_t>(instruction.offsets[0]);
    std::memcpy(rows[lane], place_of(warp, instruction, addresses[lane], /*write=*/false), 16);
    for (size_t i = 0; i < 8; ++i) defined[lane][i] = written(warp, addresses[lane] + 2 * i, 2);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int line = lane / 4, pair = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const uint16_t low = kTransposed ? rows[8 * m + pair][line] : rows[8 * m + line][pair];
      const uint16_t high = kTransposed ? rows[8 * m + pair + 1][line] : rows[8 * m + line][pair + 1];
      warp.lanes_of(r[static_cast<size_t>(m)])[lane] = low | static_cast<uint32_t>(high) << 16;
      warp.set_undefined(r[static_cast<size_t>(m)], uint32_t{1} << lane, 0);
      const bool low_defined = kTransposed ? defined[8 * m + pair][line] : defined[8 * m + line][pair];
      const bool high_defined =
          kTransposed ? defined[8 * m + pair + 1][line] : defined[8 * m + line][pair + 1];
      warp.set_undefined(r[static_cast<size_t>(m)], 0, uint32_t{1} << lane, low_defined ? 0 : kAllLanes);
      warp.set_undefined(r[static_cast<size_t>(m)], 1, uint32_t{1} << lane, high_defined ? 0 : kAllLanes);
    }
  }
  count(instruction, addresses, lanes, 16);
}

struct Type {
  const char* name;
  uint8_t width;
  bool is_signed;
};
constexpr Type kTypes[] = {{"u8", 1, false},  {"s8", 1, true},   {"b8", 1, false},  {"u16", 2, false},
                           {"s16", 2, true},  {"b16", 2, false}, {"u32", 4, false}, {"s32", 4, true},
                           {"b32", 4, false}, {"f32", 4, false}, {"u64", 8, false}, {"s64", 8, true},
                           {"b64", 8, false}, {"f64", 8, false}};

}  // namespace

void add_memory(Operations& o) {
  const std::pair<const char*, Space> spaces[] = {{"", Space::kGeneric},
                                                  {".global", Space::kGlobal},
                                                  {".global.nc", Space::kGlobal},
                                                  {".shared", Space::kShared},
                                                  {".param", Space::kParameters}};
  for (const auto& [space_name, space] : spaces) {
    for (const uint8_t elements : {1, 2, 4}) {
      const std::string vector = elements == 1 ? "" : ".v" + std::to_string(elements);
      for (const Type& type : kTypes) {
        Instruction one = own_operation(&load, elements);
        one.space = space;
        one.elements = elements;
        one.width = type.width;
        one.is_signed = type.is_signed;
        const std::string end = space_name + vector + "." + type.name;
        o["ld" + end] = one;
        one.execute = &store;
        one.results = 0;
        o["st" + end] = one;
      }
    }
  }
  Instruction copying = own_operation(&copy, 0);
  copying.space = Space::kShared;
  copying.width = 16;
  o["cp.async.cg.shared.global"] = copying;
  copying.width = 4;
  o["cp.async.ca.shared.global"] = copying;
  o["cp.async.commit_group"] = own_operation(&commit, 0);
  o["cp.async.wait_group"] = own_operation(&wait, 0);
  Instruction matrices = own_operation(&load_matrices<false>, 4, Flow::kTogether);
  matrices.space = Space::kShared;
  matrices.width = 16;
  o["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = matrices;
  matrices.execute = &load_matrices<true>;
  o["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = matrices;
}

}  // namespace ptx
