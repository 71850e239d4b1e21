// Runs kernels on a CPU: every thread of a block is a fiber, which goes on until it meets the others of its
// warp or block. Blocks run one after another, in shuffled order; shared memory is filled with a pattern
// before each, so that nothing is read that the block did not write. A thread that waits for one that never
// comes is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace host_cuda {

struct Place {
  int64_t block_x = 0, blocks_x = 1;
  int block_y = 0, blocks_y = 1;
  int thread = 0, threads = 1;
};

const Place& here();  // of the fiber that is running
void* shared_memory();

void block_barrier();
// What the lanes of a warp do together: each brings some bytes and gets those of all 32, one after another,
// until it meets them again. All must be at the same operation, `what`. Where there is a `combine`, it is
// called once and puts in place of these bytes what the lanes are to get.
using Combine = void (*)(unsigned char* all);
const unsigned char* warp_exchange(const char* what, const void* mine, size_t bytes,
                                   Combine combine = nullptr);

// Asynchronous copies: nothing is there until the thread has waited for the group. What is beyond `filled` is
// zeros.
void start_copy(void* to, const void* from, size_t bytes, size_t filled);
void end_copy_group();
void finish_copies(size_t pending);  // until at most so many groups are under way

// Which blocks run of each launch: all, or the last `count` (of each row), for grids too large to run whole.
void run_last_blocks_only(int64_t count);  // 0: all

// Runs thread() for each thread of the grid. Throws std::runtime_error on divergence.
void run(int64_t blocks_x, int blocks_y, int threads, int64_t shared_bytes,
         const std::function<void()>& thread);

}  // namespace host_cuda
