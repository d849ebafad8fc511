// Emulates the instructions and the shared memory of cuda/device.cuh in C++.
#pragma once

#include <cmath>

#include "block.h"

namespace storage_ops {

template <typename T>
T& shared_memory() {
  static const char key = 0;
  return *static_cast<T*>(emulation::shared_memory(&key, sizeof(T)));
}

// CUDA documents an error of at most 2 ulp. Subnormal operands and results are zero.
inline float exp2_approx(float x) {
  if (std::isnan(x)) return x;
  const float power = emulation::off_by(1.5 * 0x1p-23, std::exp2(static_cast<double>(x)));
  return power < 0x1p-126f ? 0.0f : power;
}

inline float max_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

}  // namespace storage_ops
