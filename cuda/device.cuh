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

// Starts to copy 16 bytes of global to shared memory. `to` is undefined until this thread has
// waited for the copy. Needs sm_80.
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// The same for fewer bytes. The others become 0.
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
// before sm_90 has none. There each block is a cluster of its own, and sends nothing.
#if __CUDA_ARCH__ >= 900
#define STORAGE_OPS_CLUSTERS 1
#else
#define STORAGE_OPS_CLUSTERS 0
#endif

// Returns the number of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if STORAGE_OPS_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Waits for all threads of the cluster. It also waits for their writes to memory, which takes long.
__device__ __forceinline__ void cluster_barrier() {
#if STORAGE_OPS_CLUSTERS
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// A place in shared memory for one letter from each of up to n blocks of a cluster. It is used
// again and again. The letters of one use are a round.
template <unsigned n>
struct Mailbox {
  uint4 letters[n];
  uint64_t arrived;  // an mbarrier that counts bytes

#if STORAGE_OPS_CLUSTERS
  static __device__ __forceinline__ unsigned address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
  }
  static __device__ __forceinline__ unsigned address_in(unsigned rank, const void* p) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(rank));
    return there;
  }
#endif

  // Prepares the mailbox. One thread calls this before the first barrier of the cluster.
  __device__ __forceinline__ void open() {
#if STORAGE_OPS_CLUSTERS
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&arrived)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Says how many letters a round has. One thread calls this once in a round.
  __device__ __forceinline__ void expect([[maybe_unused]] unsigned count) {
#if STORAGE_OPS_CLUSTERS
    const auto bytes = static_cast<unsigned>(count * sizeof(uint4));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&arrived)),
                 "r"(bytes)
                 : "memory");
#endif
  }

  // Sends a letter from this block to the same mailbox of a block, which may be this one.
  __device__ __forceinline__ void send([[maybe_unused]] unsigned to,
                                       [[maybe_unused]] const uint4& letter) const {
#if STORAGE_OPS_CLUSTERS
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address_in(to, letters + cluster_rank())),
        "r"(letter.x), "r"(letter.y), "r"(letter.z), "r"(letter.w), "r"(address_in(to, &arrived))
        : "memory");
#endif
  }

  // Waits until the letters of a round have arrived. `odd` says whether the round has an odd
  // number.
  __device__ __forceinline__ void wait([[maybe_unused]] unsigned odd) const {
#if STORAGE_OPS_CLUSTERS
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address(&arrived)),
        "r"(odd)
        : "memory");
#endif
  }
};

}  // namespace storage_ops
