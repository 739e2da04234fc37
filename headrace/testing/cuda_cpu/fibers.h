// Fibers that carry CUDA threads: one stack each, switched by hand, known to the sanitizers.
// x86-64 switches in 15 instructions, other processors through ucontext.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace cuda_cpu {

constexpr size_t kStackBytes = 256 << 10;

struct Stack {
  void* saved = nullptr;         // where the stack pointer was when it was left
  char* memory = nullptr;        // nullptr: the operating system's own stack, where launches start
  ucontext_t context;
  void* sanitizer_fiber = nullptr;
  void* fake_stack = nullptr;
};

inline Stack home;
inline const void* home_bottom;
inline size_t home_size;

inline char* map_stack() {
  return static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

#if defined(__x86_64__)
extern "C" void cuda_cpu_swap(void** save_to, void* load_from);
asm(R"(.text
.weak cuda_cpu_swap
.type cuda_cpu_swap,@function
cuda_cpu_swap:
  pushq %rbx; pushq %rbp; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbp; popq %rbx
  ret
.size cuda_cpu_swap,.-cuda_cpu_swap)");

inline void swap_stacks(Stack& from, Stack& to) { cuda_cpu_swap(&from.saved, to.saved); }

inline void prepare_stack(Stack& stack, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack.memory, kStackBytes);
#endif
  void** top = reinterpret_cast<void**>(stack.memory + kStackBytes);
  *--top = nullptr;                              // keeps the alignment that a call would leave
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that are popped
  stack.saved = top;
}
#else
inline void swap_stacks(Stack& from, Stack& to) { swapcontext(&from.context, &to.context); }

inline void prepare_stack(Stack& stack, void (*entry)()) {
  getcontext(&stack.context);
  stack.context.uc_stack.ss_sp = stack.memory;
  stack.context.uc_stack.ss_size = kStackBytes;
  stack.context.uc_link = nullptr;
  makecontext(&stack.context, entry, 0);
}
#endif

// A switch orders nothing for the thread sanitizer: only barriers and collectives do.
inline void switch_stack(Stack& from, Stack& to, bool ends = false) {
#if defined(__SANITIZE_ADDRESS__)
  const bool is_home = to.memory == nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack,
                                 is_home ? home_bottom : to.memory,
                                 is_home ? home_size : kStackBytes);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.sanitizer_fiber, 1);
#endif
  (void)ends;
  swap_stacks(from, to);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

inline void release(void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(tag);
#endif
  (void)tag;
}

inline void acquire(void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(tag);
#endif
  (void)tag;
}

// The emulator's own bookkeeping is not part of the program under test.
struct Untracked {
#if defined(__SANITIZE_THREAD__)
  Untracked() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Untracked() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Untracked() {}
#endif
};

}  // namespace cuda_cpu
