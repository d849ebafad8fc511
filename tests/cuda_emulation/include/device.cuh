// Emulates the instructions and the shared memory of cuda/device.cuh in C++.
#pragma once

#include <cmath>
#include <cstring>

#include "block.h"

namespace storage_ops {

template <typename T>
T& shared_memory() {
  static const char key = 0;
  return *static_cast<T*>(emulation::shared_memory(&key, sizeof(T)));
}

inline uint4* dynamic_shared_memory() {
  return static_cast<uint4*>(emulation::dynamic_shared_memory());
}

// CUDA documents an error of at most 2 ulp. Subnormal operands and results are zero.
inline float exp2_approx(float x) {
  if (std::isnan(x)) return x;
  const float power = emulation::off_by(1.5 * 0x1p-23, std::exp2(static_cast<double>(x)));
  return power < 0x1p-126f ? 0.0f : power;
}

inline float max_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

// Until a copy has landed, its destination is nan. The source is read at the start or at the end.
inline void copy_async(uint4* to, const uint4* from, unsigned bytes = sizeof(uint4)) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof *from || bytes > sizeof *from) __builtin_trap();
  *to = {~0u, ~0u, ~0u, ~0u};
  emulation::Copy copy{to, from, bytes, emulation::coin()};
  if (copy.early) copy.read();
  emulation::begin_copy(copy);
}

inline void end_group_of_copies() { emulation::end_group_of_copies(); }

template <int n>
void wait_for_copies() {
  for (emulation::Copy& copy : emulation::landed(n)) {
    if (!copy.early) copy.read();
    std::memcpy(copy.to, copy.data, sizeof copy.data);
  }
}

inline unsigned cluster_rank() { return emulation::cluster_rank(); }

inline void cluster_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::cluster_barrier({"cluster_barrier", file, line});
}

template <unsigned n>
struct Mailbox {
  uint4 letters[n];
  uint64_t arrived;

  void open() { emulation::open_mailbox(this); }
  void expect(unsigned count) { emulation::expect_letters(this, count); }
  void send(unsigned to, const uint4& letter) const {
    auto* const there = static_cast<const Mailbox*>(emulation::in_block(to, this));
    const_cast<Mailbox*>(there)->letters[cluster_rank()] = letter;
    emulation::deliver(there, to);
  }
  void wait(unsigned odd, const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    emulation::wait_for_letters(this, odd, {"Mailbox::wait", file, line});
  }
};

}  // namespace storage_ops
