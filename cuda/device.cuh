// What only a GPU's compiler understands: shared memory and instructions of PTX. Included by its
// name on the include path, where tests/cuda_emulation puts the same for a CPU.
#pragma once

namespace storage_ops {

// Memory that the threads of a block share: one T, however often a kernel asks for it.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ T memory;
  return memory;
}

// 2^x, 0 where that is under 2^-126. __expf also treats those, in three more instructions.
__device__ __forceinline__ float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// The larger number, nan if either is: fmax drops it. From sm_80 on.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace storage_ops
