// A thread of execution that can be suspended and resumed. Written by hand for x86-64: swapcontext() sets the
// kernel's signal mask each time, which takes ten times as long as the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)

asm(R"(
.pushsection .text
.type host_cuda_switch, @function
host_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_cuda_switch, . - host_cuda_switch
.popsection
)");

namespace host_cuda {

struct Context {
  void* stack_pointer = nullptr;
};
void switch_context(Context& from, Context& to) asm("host_cuda_switch");

// `to` begins with main() on a stack of its own, which it must not return from.
inline void make_context(Context& to, char* stack, size_t size, void (*main)()) {
  auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + size) & ~uintptr_t{63}) - 8;
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(main);  // above the six registers: the address that the switch returns to
  to.stack_pointer = top;
}

}  // namespace host_cuda

#else

#include <ucontext.h>

namespace host_cuda {

struct Context {
  ucontext_t context{};
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

inline void make_context(Context& to, char* stack, size_t size, void (*main)()) {
  getcontext(&to.context);
  to.context.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = size};
  to.context.uc_link = nullptr;
  makecontext(&to.context, main, 0);
}

}  // namespace host_cuda

#endif
