// Runs kernels on a CPU: every thread of a block is a fiber, which runs until it has to wait for the others
// of its warp or block. Blocks run one after another, in shuffled order, and so do the warps of a block and
// the lanes of a warp. Shared memory is filled with a pattern before each, to show reads of what the block
// did not write. A thread that waits for one that never comes is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace host_cuda {

struct Place {
  int64_t block_x = 0, blocks_x = 1;
  int block_y = 0, blocks_y = 1;
  int thread = 0, threads = 1;
};

bool in_a_thread();   // whether a thread of a kernel is running
const Place& here();  // of that thread
void set_here(const Place* place);
void* shared_memory();

void block_barrier();
// An exchange between the lanes of a warp: each passes some bytes and gets those of all 32, one after
// another, which stay valid until the next exchange. All must be at the same operation, `what`. If there is a
// `combine`, it is called once and replaces these bytes by what the lanes are to get.
// `orders_memory`: what a lane did to memory before it is done for all lanes after it.
using Combine = void (*)(unsigned char* all);
const unsigned char* warp_exchange(const char* what, const void* mine, size_t bytes,
                                   Combine combine = nullptr, bool orders_memory = false);

class Copies;
Copies& copies();  // of the fiber that is running

void copy_at_once(bool on);
bool copies_at_once();

// The shared memory of a block, in bytes, at most: 99 KiB as every GPU has it, or what some have.
int shared_limit();
void set_shared_limit(int bytes);

// Which blocks run of each launch: all, or the last `count` (of each row), for grids too large to run whole.
void run_last_blocks_only(int64_t count);  // 0: all

// A grid of blocks: what launch.cuh is given.
struct Launch {
  int64_t blocks_x;
  int blocks_y;
  int threads;
  int64_t shared_bytes;
  std::function<void()> thread;  // calls the kernel
  const void* kernel = nullptr;
  std::vector<std::pair<const void*, size_t>> arguments = {};  // where each is, and its bytes
};

// Runs thread() for each thread of the grid. Throws std::runtime_error on divergence.
void run(const Launch& launch);

// Something else that runs each block of a launch.
using Runner = std::function<void(const Launch&, const Place& block)>;
void set_runner(Runner runner);

}  // namespace host_cuda
