// Stacks for threads of a kernel, and the calls that describe them to the sanitizers.
#pragma once

#include <sys/mman.h>

#include <new>

#if defined(EMULATION_THREAD)
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#elif defined(EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

// Saves the caller's registers on its stack, stores the stack pointer, and continues on another
// stack.
extern "C" void emulation_switch_stacks(void** save, void* resume);
asm(R"(
.text
emulation_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulation {

// A function on its own stack that alternates with the scheduler.
class Fiber {
 public:
  Fiber() {
    stack_ = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stack_ == MAP_FAILED) throw std::bad_alloc();
#if defined(EMULATION_THREAD)
    known_as_ = __tsan_create_fiber(0);
#endif
  }

  ~Fiber() {
#if defined(EMULATION_THREAD)
    __tsan_destroy_fiber(known_as_);
#elif defined(EMULATION_ADDRESS)
    __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
    munmap(stack_, kStackBytes);
  }

  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the fiber run `body` next. `body` must not return.
  void start(void (*body)()) {
    auto** top = reinterpret_cast<void**>(stack_ + kStackBytes);
    *--top = nullptr;  // the return address of `body`
    *--top = reinterpret_cast<void*>(body);
    pointer_ = top - kSavedRegisters;
  }

  // The scheduler calls this. It runs until the fiber calls `leave`.
  void enter() {
#if defined(EMULATION_THREAD)
    scheduler_known_as_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(known_as_, __tsan_switch_to_fiber_no_sync);
#endif
    emulation_switch_stacks(&scheduler_, pointer_);
  }

  void leave() {
#if defined(EMULATION_THREAD)
    __tsan_switch_to_fiber(scheduler_known_as_, __tsan_switch_to_fiber_no_sync);
#endif
    emulation_switch_stacks(&pointer_, scheduler_);
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  static constexpr int kSavedRegisters = 6;
  static inline void* scheduler_ = nullptr;
  char* stack_;
  void* pointer_ = nullptr;
#if defined(EMULATION_THREAD)
  static inline void* scheduler_known_as_ = nullptr;
  void* known_as_;
#endif
};

// Everything before `release(token)` happens before everything after `acquire(token)`.
inline void release([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
  __tsan_release(token);
#endif
}

inline void acquire([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
  __tsan_acquire(token);
#endif
}

// While one exists, the sanitizer ignores writes of the running thread.
struct Unwatched {
#if defined(EMULATION_THREAD)
  Unwatched() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Unwatched() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
#else
  Unwatched() {}
#endif
};

}  // namespace emulation
