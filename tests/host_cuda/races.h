// Finds races in shared memory: two threads of a block use one byte, at least one of them writes it, and
// nothing orders the two. What orders memory is a block's barrier, a warp's barrier, and the wait for an
// asynchronous copy by the thread that began it. Shuffles, votes and products of matrices do not. A copy may
// write at any time between its beginning and that wait.
//
// Every access is seen: kernels are compiled with -fsanitize=thread and linked with races.cpp in place of the
// sanitizer's own library. What is found does not depend on the order in which the threads happen to run.
#pragma once

#include <cstddef>
#include <string>

namespace host_cuda::races {

// A block begins: its shared memory, and the threads' number.
void begin_block(const void* shared, size_t bytes, int threads);
// What was found in it, in a sentence; empty: nothing.
std::string end_block();

void after_block_barrier();
void after_warp_barrier(int warp);
void copy_begins(const void* to, size_t bytes);
void copy_is_waited_for(const void* to, size_t bytes);
void read(const void* from, size_t bytes);
void write(const void* to, size_t bytes);

}  // namespace host_cuda::races
