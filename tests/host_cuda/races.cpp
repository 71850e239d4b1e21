#include "races.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "executor.h"

namespace host_cuda::races {

namespace {

constexpr int kNobody = -1;
constexpr int kWarp = 32;

// When a thread did something: how many barriers its block and its warp had passed.
struct Time {
  int thread = kNobody;
  int block = 0;
  int warp = 0;
};

// What was done to a byte since the last write that is ordered before everything since.
struct Byte {
  Time written;
  // The last reads of two threads, the later one first, by the barriers of their warp.
  Time reads[2];
  bool several_warps = false;  // have read it since the block's last barrier
  int copying = kNobody;       // the thread whose copy into it is under way
};

struct Block {
  const unsigned char* shared = nullptr;
  std::vector<Byte> bytes;
  int barriers = 0;
  std::vector<int> of_warps;
  std::string found;
};

Block& block() {
  static Block block;
  return block;
}

Time now() {
  const int thread = here().thread;
  return {thread, block().barriers, block().of_warps[static_cast<size_t>(thread / kWarp)]};
}

// Whether what was done at `then` is ordered before what is done at `now`.
bool before(const Time& then, const Time& now) {
  if (then.thread == kNobody || then.thread == now.thread || then.block < now.block) return true;
  return then.thread / kWarp == now.thread / kWarp && then.warp < now.warp;
}

void report(size_t place, const Time& now, const char* does, int other, const char* did) {
  Block& b = block();
  if (!b.found.empty()) return;
  const Place& at = here();
  b.found = "a race: block " + std::to_string(at.block_x) + ", " + std::to_string(at.block_y) + ", thread " +
            std::to_string(now.thread) + " " + does + " byte " + std::to_string(place) +
            " of shared memory, which thread " + std::to_string(other) + " " + did +
            ", with nothing that orders the two";
}

// Checks that all that was done to the byte is ordered before a write.
void check_write(size_t place, const Byte& byte, const Time& now, const char* does) {
  if (byte.copying != kNobody) return report(place, now, does, byte.copying, "copies to");
  if (!before(byte.written, now)) return report(place, now, does, byte.written.thread, "wrote");
  for (const Time& read : byte.reads) {
    if (!before(read, now)) return report(place, now, does, read.thread, "read");
  }
  if (byte.several_warps && byte.reads[0].block == now.block) {
    report(place, now, does, byte.reads[0].thread, "and others read");
  }
}

void note_write(Byte& byte, const Time& now) {
  byte = Byte();
  byte.written = now;
}

void note_read(Byte& byte, const Time& now) {
  Time& last = byte.reads[0];
  if (last.thread == kNobody || last.block < now.block) {
    byte.reads[1] = Time();
    byte.several_warps = false;
  } else if (last.thread != now.thread) {
    byte.several_warps = byte.several_warps || last.thread / kWarp != now.thread / kWarp;
    byte.reads[1] = last;
  }
  last = now;
}

// Calls use(its number, byte, now) for each byte of shared memory in the range.
template <typename Use>
void each_byte(const void* at, size_t bytes, const Use& use) {
  Block& b = block();
  const auto* begin = static_cast<const unsigned char*>(at);
  if (b.shared == nullptr || begin + bytes <= b.shared || begin >= b.shared + b.bytes.size()) return;
  if (!in_a_thread()) return;  // what the executor does for a whole warp
  const Time time = now();
  for (const unsigned char* p = std::max(begin, b.shared);
       p < std::min(begin + bytes, b.shared + b.bytes.size()); ++p) {
    const auto place = static_cast<size_t>(p - b.shared);
    use(place, b.bytes[place], time);
  }
}

}  // namespace

void begin_block(const void* shared, size_t bytes, int threads) {
  Block& b = block();
  b.shared = static_cast<const unsigned char*>(shared);
  b.bytes.assign(bytes, Byte());
  b.barriers = 0;
  b.of_warps.assign(static_cast<size_t>((threads + kWarp - 1) / kWarp), 0);
  b.found.clear();
}

std::string end_block() {
  block().shared = nullptr;
  return block().found;
}

void after_block_barrier() { ++block().barriers; }
void after_warp_barrier(int warp) { ++block().of_warps[static_cast<size_t>(warp)]; }

void copy_begins(const void* to, size_t bytes) {
  each_byte(to, bytes, [](size_t place, Byte& byte, const Time& time) {
    check_write(place, byte, time, "copies to");
    byte.copying = time.thread;
  });
}

void copy_is_waited_for(const void* to, size_t bytes) {
  each_byte(to, bytes, [](size_t, Byte& byte, const Time& time) { note_write(byte, time); });
}

void read(const void* from, size_t bytes) {
  each_byte(from, bytes, [](size_t place, Byte& byte, const Time& time) {
    if (byte.copying != kNobody) return report(place, time, "reads", byte.copying, "copies to");
    if (!before(byte.written, time)) report(place, time, "reads", byte.written.thread, "wrote");
    note_read(byte, time);
  });
}

void write(const void* to, size_t bytes) {
  each_byte(to, bytes, [](size_t place, Byte& byte, const Time& time) {
    check_write(place, byte, time, "writes");
    note_write(byte, time);
  });
}

}  // namespace host_cuda::races

#if !defined(__SANITIZE_ADDRESS__)  // with which only the executor tells of accesses

// What -fsanitize=thread has code call. Nothing may be thrown here: compilers take these for calls that do
// not throw.
#define HOST_CUDA_ACCESS(SIZE)                                                       \
  void __tsan_read##SIZE(void* at) { host_cuda::races::read(at, SIZE); }             \
  void __tsan_write##SIZE(void* at) { host_cuda::races::write(at, SIZE); }           \
  void __tsan_unaligned_read##SIZE(void* at) { host_cuda::races::read(at, SIZE); }   \
  void __tsan_unaligned_write##SIZE(void* at) { host_cuda::races::write(at, SIZE); } \
  void __tsan_volatile_read##SIZE(void* at) { host_cuda::races::read(at, SIZE); }    \
  void __tsan_volatile_write##SIZE(void* at) { host_cuda::races::write(at, SIZE); }

extern "C" {
HOST_CUDA_ACCESS(1)
HOST_CUDA_ACCESS(2)
HOST_CUDA_ACCESS(4)
HOST_CUDA_ACCESS(8)
HOST_CUDA_ACCESS(16)
void __tsan_read_range(void* at, unsigned long size) { host_cuda::races::read(at, size); }
void __tsan_write_range(void* at, unsigned long size) { host_cuda::races::write(at, size); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

#endif
