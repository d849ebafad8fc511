// Launching on torch's current stream, and reductions over a block.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "stable.h"

namespace storage_ops {

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Combines one value per thread with `combine` and hands the result to every thread. `scratch`
// holds one value per warp. Always in the same order: two runs give the same bits.
template <typename T, typename Combine>
__device__ __forceinline__ T block_reduce(T value, T identity, T* scratch, Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, value.shuffle_down(offset));
  }
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < warps ? scratch[lane] : identity;
    for (int offset = 16; offset > 0; offset /= 2) {
      value = combine(value, value.shuffle_down(offset));
    }
    if (lane == 0) scratch[0] = value;
  }
  __syncthreads();
  return scratch[0];
}

}  // namespace storage_ops
