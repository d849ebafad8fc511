// Small kernels, each for one correct or wrong interaction of threads.
#include <cuda_runtime.h>

#include <cstdio>
#include <device.cuh>
#include <exception>

namespace {

constexpr unsigned kAll = ~0u;

__global__ void exchange(unsigned* out, unsigned) {
  const unsigned lane = threadIdx.x % 32, thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned votes = __ballot_sync(kAll, lane % 3 == 0);
  unsigned sum = thread;
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  for (unsigned offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(half, sum, offset);
  out[thread] = votes ^ sum;
}

// Each thread passes a number to the next of its warp, and then to the next of its block.
__global__ void rotate(unsigned* out, unsigned) {
  auto& shared = storage_ops::shared_memory<unsigned[1024]>();
  const unsigned thread = threadIdx.x, warp = thread / 32 * 32, lane = thread % 32;
  shared[thread] = 100 * blockIdx.x + thread;
  __syncwarp();
  const unsigned from_lane = shared[warp + (lane + 1) % 32];
  __syncthreads();
  const unsigned from_block = shared[(thread + 1) % blockDim.x];
  out[blockIdx.x * blockDim.x + thread] = 1000 * from_lane + from_block;
}

__global__ void unwritten(unsigned* out, unsigned) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = storage_ops::shared_memory<unsigned[32]>()[0];
}

__global__ void two_barriers(unsigned*, unsigned) {
  if (threadIdx.x < 5) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void two_masks(unsigned*, unsigned) {
  __ballot_sync(threadIdx.x % 32 < 5 ? kAll : 0xffffff00u, true);
}

__global__ void beyond(unsigned* out, unsigned) { out[(1ull << 40) + threadIdx.x] = 0; }

__global__ void unaligned(unsigned* out, unsigned) {
  *reinterpret_cast<uint4*>(out + 1 + threadIdx.x) = {};
}

constexpr void (*kKernels[])(unsigned*, unsigned) = {exchange,  rotate, unwritten, two_barriers,
                                                     two_masks, beyond, unaligned};

}  // namespace

// Runs a kernel by its number. The emulation writes its error to `message`.
extern "C" __attribute__((visibility("default"))) void run_primitive(int kernel, unsigned blocks,
                                                                     unsigned threads,
                                                                     unsigned* out, char* message,
                                                                     size_t room) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3{blocks, 1, 1};
  config.blockDim = dim3{threads, 1, 1};
  try {
    const cudaError_t error = cudaLaunchKernelEx(&config, kKernels[kernel], out, blocks * threads);
    std::snprintf(message, room, error == cudaSuccess ? "" : "launch error %d", error);
  } catch (const std::exception& error) {
    std::snprintf(message, room, "%s", error.what());
  }
}
