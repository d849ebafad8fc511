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

// Memory that the threads of a block share, of the size that the launch asks for.
__device__ __forceinline__ uint4* dynamic_shared_memory() {
  extern __shared__ uint4 dynamic_memory[];
  return dynamic_memory;
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

// Starts to copy 16 bytes of global to shared memory. Only the first `bytes` are read, the others
// become 0. `to` is undefined until this thread has waited for the copy. Needs sm_80.
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from, unsigned bytes) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
               : "memory");
}

// Makes one group, possibly empty, of the copies that this thread has started since the last group.
__device__ __forceinline__ void end_group_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the last n. Another thread may read the copies after a
// barrier.
template <int n>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// Clusters are blocks that run at the same time and write to the shared memory of each other. A GPU
// before sm_90 has none, so that each block is a cluster of its own.

// Returns the number of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Waits for all threads of the cluster, and orders their accesses to all memory.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// Returns `shared_memory<T>()` of another block of the cluster. The other block must have come to a
// barrier of the cluster before, and must not end before the access.
template <typename T>
__device__ __forceinline__ T& shared_memory_of([[maybe_unused]] unsigned rank) {
  T* memory = &shared_memory<T>();
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %0, %1;" : "+l"(memory) : "r"(rank));
#endif
  return *memory;
}

}  // namespace storage_ops
