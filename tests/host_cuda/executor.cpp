#include "executor.h"

#include "context.h"
#include "copies.h"
#include "races.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace host_cuda {

namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 * 1024;
constexpr unsigned char kPoison = 0xa7;  // far out of range as an index, strange as float and half
constexpr size_t kGuard = 256;

enum class Waits { kNothing, kWarp, kBlock, kDone };

struct Fiber {
  Context context;
  Place place;
  Waits waits = Waits::kNothing;
  const void* brought = nullptr;  // what it passed to its warp's exchange
  size_t bytes = 0;
  const char* what = "";
  Combine combine = nullptr;
  bool orders_memory = false;
  const unsigned char* taken = nullptr;  // what all lanes passed, or what was combined from it
  Copies copies;
  char* stack = nullptr;
  void* fake_stack = nullptr;
};

struct Machine {
  Context scheduler;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* running = nullptr;
  const std::function<void()>* thread = nullptr;
  std::exception_ptr error;
  std::vector<unsigned char> shared_room;
  unsigned char* shared = nullptr;  // aligned, with a guard on either side
  // Per warp: what its lanes passed to the last exchange, one after another.
  std::vector<std::vector<unsigned char>> brought;
  int64_t last_blocks = 0;
  bool copies_at_once = false;
  int shared_limit = 99 * 1024;
  const Place* here = nullptr;
  Runner runner;
  std::mt19937 random{20240611};

  ~Machine() {
    for (auto& fiber : fibers) munmap(fiber->stack, kStack);
  }
};

Machine& machine() {
  static Machine machine;
  return machine;
}

// Tells the sanitizer about every switch of stacks.
void start_switch([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom,
                  [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
}
void finish_switch([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom,
                   [[maybe_unused]] size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

void protect([[maybe_unused]] const void* begin, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool on) {
#if defined(__SANITIZE_ADDRESS__)
  if (on) {
    ASAN_POISON_MEMORY_REGION(begin, bytes);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
  }
#endif
}

void to_scheduler(Waits waits) {
  Machine& m = machine();
  Fiber* self = m.running;
  self->waits = waits;
  start_switch(waits == Waits::kDone ? nullptr : &self->fake_stack, m.stack_bottom, m.stack_size);
  switch_context(self->context, m.scheduler);
  finish_switch(self->fake_stack, &m.stack_bottom, &m.stack_size);
}

void fiber_main() {
  Machine& m = machine();
  finish_switch(nullptr, &m.stack_bottom, &m.stack_size);
  try {
    (*m.thread)();
  } catch (...) {
    m.error = std::current_exception();
  }
  to_scheduler(Waits::kDone);
}

void resume(Fiber& fiber) {
  Machine& m = machine();
  m.running = &fiber;
  m.here = &fiber.place;
  fiber.waits = Waits::kNothing;
  start_switch(&m.fake_stack, fiber.stack, kStack);
  switch_context(m.scheduler, fiber.context);
  finish_switch(m.fake_stack, nullptr, nullptr);
  m.running = nullptr;
  m.here = nullptr;
}

Fiber& fiber_at(size_t i) {
  Machine& m = machine();
  while (m.fibers.size() <= i) {
    auto fiber = std::make_unique<Fiber>();
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    fiber->stack = static_cast<char*>(stack);
    m.fibers.push_back(std::move(fiber));
  }
  return *m.fibers[i];
}

[[noreturn]] void diverged(const Place& place, const char* what) {
  throw std::runtime_error("block " + std::to_string(place.block_x) + ", " + std::to_string(place.block_y) +
                           ": thread " + std::to_string(place.thread) + " waits at " + what +
                           " for threads that do not come");
}

bool all_wait(int begin, int end, Waits waits) {
  for (int t = begin; t < end; ++t) {
    if (fiber_at(t).waits != waits) return false;
  }
  return true;
}

// Resumes the threads [begin, end) of a warp, which have all passed a value: each gets the values of all.
// What they got the time before is no longer read.
void exchange(int begin, int end) {
  Machine& m = machine();
  const Fiber& first = fiber_at(begin);
  const auto warp = static_cast<size_t>(begin / kWarp);
  if (m.brought.size() <= warp) m.brought.resize(warp + 1);
  std::vector<unsigned char>& brought = m.brought[warp];
  brought.assign(kWarp * first.bytes, kPoison);
  for (int t = begin; t < end; ++t) {
    Fiber& fiber = fiber_at(t);
    if (std::strcmp(fiber.what, first.what) != 0 || fiber.bytes != first.bytes) {
      throw std::runtime_error(std::string("lanes of a warp meet at ") + first.what + " and at " +
                               fiber.what);
    }
    std::memcpy(brought.data() + static_cast<size_t>(t - begin) * fiber.bytes, fiber.brought, fiber.bytes);
    fiber.waits = Waits::kNothing;
  }
  if (first.combine != nullptr) first.combine(brought.data());
  if (first.orders_memory) races::after_warp_barrier(begin / kWarp);
  for (int t = begin; t < end; ++t) fiber_at(t).taken = brought.data();
}

void run_block(int threads, const Place& place, int64_t shared_bytes) {
  Machine& m = machine();
  const auto bytes = static_cast<size_t>(shared_bytes);
  m.shared_room.assign(3 * kGuard + bytes, kPoison);
  m.shared = m.shared_room.data() + kGuard;
  m.shared += (kGuard - reinterpret_cast<uintptr_t>(m.shared) % kGuard) % kGuard;
  protect(m.shared - kGuard, kGuard, true);
  protect(m.shared + bytes, kGuard, true);
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fiber_at(t);
    protect(fiber.stack, kStack, false);  // undoes what the last block's frames left
    make_context(fiber.context, fiber.stack, kStack, &fiber_main);
    fiber.place = place;
    fiber.place.thread = t;
    fiber.waits = Waits::kNothing;
    fiber.copies = Copies(m.copies_at_once);
  }
  races::begin_block(m.shared, bytes, threads);
  std::vector<int> warps(static_cast<size_t>((threads + kWarp - 1) / kWarp));
  std::vector<int> lanes(kWarp);
  std::iota(warps.begin(), warps.end(), 0);
  std::iota(lanes.begin(), lanes.end(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(warps.begin(), warps.end(), m.random);
    for (const int warp : warps) {
      const int begin = warp * kWarp, end = std::min(begin + kWarp, threads);
      for (bool again = true; again;) {
        std::shuffle(lanes.begin(), lanes.end(), m.random);
        for (const int lane : lanes) {
          const int t = begin + lane;
          if (t >= end || fiber_at(t).waits != Waits::kNothing) continue;
          resume(fiber_at(t));
          moved = true;
          if (m.error) std::rethrow_exception(std::exchange(m.error, nullptr));
        }
        again = all_wait(begin, end, Waits::kWarp);
        if (again) exchange(begin, end);
      }
    }
    if (all_wait(0, threads, Waits::kBlock)) {
      for (int t = 0; t < threads; ++t) fiber_at(t).waits = Waits::kNothing;
      races::after_block_barrier();
      moved = true;
    }
  }
  for (int t = 0; t < threads; ++t) {
    const Fiber& fiber = fiber_at(t);
    if (fiber.waits == Waits::kWarp) diverged(fiber.place, fiber.what);
    if (fiber.waits == Waits::kBlock) diverged(fiber.place, "a barrier");
    if (!fiber.copies.empty()) {
      throw std::runtime_error("a thread ended with copies under way");
    }
  }
  const std::string race = races::end_block();
  if (!race.empty()) throw std::runtime_error(race);
  protect(m.shared_room.data(), m.shared_room.size(), false);
  for (size_t i = 1; i <= kGuard; ++i) {
    if (*(m.shared - i) != kPoison || m.shared[bytes + i - 1] != kPoison) {
      throw std::runtime_error("a block wrote beside its shared memory");
    }
  }
}

}  // namespace

bool in_a_thread() { return machine().here != nullptr; }

const Place& here() { return *machine().here; }
void set_here(const Place* place) { machine().here = place; }

void* shared_memory() { return machine().shared; }

void block_barrier() { to_scheduler(Waits::kBlock); }

const unsigned char* warp_exchange(const char* what, const void* mine, size_t bytes, Combine combine,
                                   bool orders_memory) {
  Fiber* self = machine().running;
  self->orders_memory = orders_memory;
  self->what = what;
  self->combine = combine;
  self->brought = mine;
  self->bytes = bytes;
  to_scheduler(Waits::kWarp);
  return self->taken;
}

Copies& copies() { return machine().running->copies; }

int shared_limit() { return machine().shared_limit; }
void set_shared_limit(int bytes) { machine().shared_limit = bytes; }

void run_last_blocks_only(int64_t count) { machine().last_blocks = count; }
void copy_at_once(bool on) { machine().copies_at_once = on; }
bool copies_at_once() { return machine().copies_at_once; }
void set_runner(Runner runner) { machine().runner = std::move(runner); }

void run(const Launch& launch) {
  Machine& m = machine();
  m.thread = &launch.thread;
  const int64_t first = m.last_blocks > 0 ? std::max<int64_t>(0, launch.blocks_x - m.last_blocks) : 0;
  std::vector<int64_t> order(static_cast<size_t>((launch.blocks_x - first) * launch.blocks_y));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), m.random);
  for (const int64_t number : order) {
    Place place;
    place.blocks_x = launch.blocks_x;
    place.blocks_y = launch.blocks_y;
    place.threads = launch.threads;
    place.block_x = first + number / launch.blocks_y;
    place.block_y = static_cast<int>(number % launch.blocks_y);
    if (m.runner) {
      m.runner(launch, place);
    } else {
      run_block(launch.threads, place, launch.shared_bytes);
    }
  }
}

}  // namespace host_cuda
