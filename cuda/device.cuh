// Code that only a GPU's compiler understands: shared memory and PTX instructions. Included by a
// name on the include path, where tests/cuda_emulation has the same for a CPU.
#pragma once

namespace storage_ops {

// Memory that the threads of a block share: one T per kernel, however often it is requested.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ T memory;
  return memory;
}

// Returns 2^x, or 0 below 2^-126. __expf also handles those, by three more instructions.
__device__ __forceinline__ float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Returns the larger number, or nan if one is nan, which fmax would drop. Needs sm_80.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace storage_ops
