#include "run.h"

#include <algorithm>
#include <memory>
#include <random>

#include "races.h"
#include "symbols.h"
#include "warp.h"

namespace ptx {

namespace {

constexpr unsigned char kPoison = 0xa7;

struct Machine {
  explicit Machine(const std::string& folder) : library(folder) {}

  Library library;
  std::map<const void*, const Kernel*> kernels;  // by the host's function
  std::mt19937 random{20240611};

  const Kernel& kernel_of(const void* function) {
    const Kernel*& kernel = kernels[function];
    if (kernel == nullptr) kernel = &library.kernel(symbol_at(function));
    return *kernel;
  }
};

std::unique_ptr<Machine>& machine() {
  static std::unique_ptr<Machine> machine;
  return machine;
}

// The arguments as the kernel finds them.
std::vector<unsigned char> packed(const Kernel& kernel, const host_cuda::Launch& launch) {
  if (kernel.parameters.size() != launch.arguments.size())
    throw Fault("not the kernel's number of arguments");
  std::vector<unsigned char> bytes(kernel.parameter_bytes, kPoison);
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    const auto& [argument, size] = launch.arguments[i];
    if (parameter.bytes != size) throw Fault("an argument is not as large as " + parameter.name);
    std::memcpy(bytes.data() + parameter.offset, argument, size);
  }
  return bytes;
}

void run_warps(const Kernel& kernel, Block& block) {
  std::vector<Warp> warps;
  const int count = (block.place.threads + kLanes - 1) / kLanes;
  for (int i = 0; i < count; ++i) warps.emplace_back(kernel, block, i, host_cuda::copies_at_once());
  std::vector<size_t> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  size_t at_barrier = 0;
  do {
    at_barrier = 0;
    std::shuffle(order.begin(), order.end(), machine()->random);
    for (const size_t i : order) at_barrier += warps[i].run() ? 1 : 0;
    if (at_barrier != 0 && at_barrier != warps.size()) {
      throw Fault("warps wait at a barrier for others that have ended");
    }
    host_cuda::races::after_block_barrier();
  } while (at_barrier != 0);
}

void run_block(const host_cuda::Launch& launch, const host_cuda::Place& place) {
  const Kernel& kernel = machine()->kernel_of(launch.kernel);
  const std::vector<unsigned char> parameters = packed(kernel, launch);
  // Whole pieces of 16 bytes: a GPU gives shared memory by 128 or more.
  const size_t bytes = (static_cast<size_t>(launch.shared_bytes) + 15) / 16 * 16;
  std::vector<unsigned char> shared(bytes + 128, kPoison);
  Block block;
  block.place = place;
  block.parameters = parameters.data();
  block.shared = shared.data() + (128 - reinterpret_cast<uintptr_t>(shared.data()) % 128) % 128;
  block.written.assign(bytes, false);
  host_cuda::races::begin_block(block.shared, bytes, place.threads);
  try {
    run_warps(kernel, block);
  } catch (const Fault& fault) {
    const host_cuda::Place* at = host_cuda::in_a_thread() ? &host_cuda::here() : &place;
    throw std::runtime_error("block " + std::to_string(place.block_x) + ", " + std::to_string(place.block_y) +
                             ", thread " + std::to_string(at->thread) + ": " + fault.what());
  }
  host_cuda::set_here(nullptr);
  const std::string race = host_cuda::races::end_block();
  if (!race.empty()) throw std::runtime_error(race);
}

}  // namespace

void run_from(const std::string& folder) {
  machine() = std::make_unique<Machine>(folder);
  host_cuda::set_runner(&run_block);
}

void write_counts(std::ostream& to) {
  for (const auto& [name, kernel] : machine()->library.kernels()) {
    to << name << "\n";
    for (const Instruction& instruction : kernel->instructions) {
      const Count& count = instruction.count;
      to << count.executed << " " << count.sectors << " " << count.least_sectors << " " << count.wavefronts
         << " " << count.least_wavefronts << " " << instruction.text << "\n";
    }
    to << "\n";
  }
}

}  // namespace ptx
