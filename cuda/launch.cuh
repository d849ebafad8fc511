// Launching on torch's current stream, rows in 16-byte accesses, and reductions over a block.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstring>
#include <device.cuh>
#include <type_traits>

#include "stable.h"

namespace storage_ops {

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// The size of a launch.
struct Grid {
  unsigned blocks, threads;  // threads of a block
  unsigned cluster = 1;      // neighbouring blocks that run at the same time
  size_t dynamic_bytes = 0;  // of a block's memory, for dynamic_shared_memory
};

// A launch in the form of the runtime, for the duration of a call.
class Launch {
 public:
  explicit Launch(const Grid& grid, cudaStream_t stream = nullptr) {
    config_.gridDim = dim3{grid.blocks, 1, 1};
    config_.blockDim = dim3{grid.threads, 1, 1};
    config_.dynamicSmemBytes = grid.dynamic_bytes;
    config_.stream = stream;
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim.x = grid.cluster;
    cluster_.val.clusterDim.y = cluster_.val.clusterDim.z = 1;
    config_.attrs = &cluster_;
    config_.numAttrs = grid.cluster > 1 ? 1 : 0;  // not every GPU has clusters
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute cluster_{};
};

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            const std::remove_cv_t<Parameters>&... arguments) {
  STD_CUDA_CHECK(cudaLaunchKernelEx(Launch(grid, stream).config(), kernel, arguments...));
}

// Lets blocks of a kernel have this many bytes of dynamic memory, if they are more than the
// default.
template <typename... Parameters>
void allow_dynamic_memory(void (*kernel)(Parameters...), size_t bytes) {
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(bytes)));
}

// Returns true if the GPU has clusters, and a kernel was compiled for such a GPU. It may also have
// been translated from code for an older one.
template <typename... Parameters>
bool has_clusters(void (*kernel)(Parameters...), int32_t device) {
  cudaFuncAttributes facts{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&facts, kernel));
  return facts.ptxVersion >= 90 && attribute(cudaDevAttrClusterLaunch, device) != 0;
}

// Returns the number of clusters of a launch that run at the same time.
template <typename... Parameters>
int clusters_at_once(void (*kernel)(Parameters...), const Grid& grid) {
  int count = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, Launch(grid).config()));
  return count;
}

// 16 bytes of memory, and their numbers in the arithmetic type.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

__device__ __forceinline__ void unpack(const uint4& from, double (&to)[2], double) {
  std::memcpy(to, &from, sizeof from);
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[4], float) {
  std::memcpy(to, &from, sizeof from);
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8], BFloat16) {
  const unsigned words[] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    to[2 * k] = __uint_as_float(words[k] << 16);
    to[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8], Half) {
  __half2 pairs[4];
  std::memcpy(pairs, &from, sizeof from);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 pair = __half22float2(pairs[k]);
    to[2 * k] = pair.x;
    to[2 * k + 1] = pair.y;
  }
}

__device__ __forceinline__ void pack(const double (&from)[2], uint4& to, double) {
  std::memcpy(&to, from, sizeof to);
}

__device__ __forceinline__ void pack(const float (&from)[4], uint4& to, float) {
  std::memcpy(&to, from, sizeof to);
}

__device__ __forceinline__ void pack(const float (&from)[8], uint4& to, BFloat16) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) pairs[k] = __floats2bfloat162_rn(from[2 * k], from[2 * k + 1]);
  std::memcpy(&to, pairs, sizeof to);
}

__device__ __forceinline__ void pack(const float (&from)[8], uint4& to, Half) {
  __half2 pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) pairs[k] = __floats2half2_rn(from[2 * k], from[2 * k + 1]);
  std::memcpy(&to, pairs, sizeof to);
}

template <typename T>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(uint4) == 0;
}

// Reads n numbers.
template <int n, typename T, typename A>
__device__ __forceinline__ void load(const T* from, A (&to)[n]) {
  if (n % kPack<T> == 0 && is_aligned(from)) {
#pragma unroll
    for (int k = 0; k < n; k += kPack<T>) {
      const uint4 bits = *reinterpret_cast<const uint4*>(from + k);
      A numbers[kPack<T>];
      unpack(bits, numbers, T());
#pragma unroll
      for (int m = 0; m < kPack<T>; ++m) to[k + m] = numbers[m];
    }
  } else {
#pragma unroll
    for (int k = 0; k < n; ++k) to[k] = static_cast<A>(from[k]);
  }
}

enum Access { kRead = 1, kWrite = 2, kReadWrite = kRead | kWrite };
enum Direction { kForwards, kBackwards };

// Calls `body(column, numbers)` for every piece of n rows that this thread owns. `numbers` are n
// arrays of type A with the numbers of each row from `column` on. `kAccess` says whether they are
// loaded before, and whether the first array is stored to the row `out` after. Each thread has
// kTile packs of each row in flight at a time.
template <typename A, Access kAccess, int kTile, Direction kDirection, int n, typename T,
          typename Body>
__device__ __forceinline__ void for_pieces_of(T* const (&rows)[n], int64_t columns, Body body,
                                              T* out) {
  bool aligned = true;
#pragma unroll
  for (int r = 0; r < n; ++r) aligned = aligned && is_aligned(rows[r]);
  const unsigned packs = aligned ? static_cast<unsigned>(columns / kPack<T>) : 0;
  const unsigned step = blockDim.x * kTile, tiles = (packs + step - 1) / step;
  for (unsigned t = 0; t < tiles; ++t) {
    const unsigned begin = (kDirection == kForwards ? t : tiles - 1 - t) * step + threadIdx.x;
    uint4 tile[kTile][n];
    if constexpr (kAccess & kRead) {
#pragma unroll
      for (int u = 0; u < kTile; ++u) {
        const unsigned p = begin + u * blockDim.x;
        if (p >= packs) continue;
#pragma unroll
        for (int r = 0; r < n; ++r) tile[u][r] = reinterpret_cast<const uint4*>(rows[r])[p];
      }
    }
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      const unsigned p = begin + u * blockDim.x;
      if (p >= packs) continue;
      A numbers[n][kPack<T>];
      if constexpr (kAccess & kRead) {
#pragma unroll
        for (int r = 0; r < n; ++r) unpack(tile[u][r], numbers[r], T());
      }
      body(static_cast<int64_t>(p) * kPack<T>, numbers);
      if constexpr (kAccess & kWrite) {
        pack(numbers[0], tile[u][0], T());
        reinterpret_cast<uint4*>(out)[p] = tile[u][0];
      }
    }
  }
  // The last threads take the remainder, because they have the fewest packs.
  const int64_t rest = static_cast<int64_t>(packs) * kPack<T>;
  for (int64_t j = rest + blockDim.x - 1 - threadIdx.x; j < columns; j += blockDim.x) {
    A numbers[n][1];
    if constexpr (kAccess & kRead) {
#pragma unroll
      for (int r = 0; r < n; ++r) numbers[r][0] = static_cast<A>(rows[r][j]);
    }
    body(j, numbers);
    if constexpr (kAccess & kWrite) out[j] = static_cast<T>(numbers[0][0]);
  }
}

// The same for one row, with one array of numbers.
template <typename A, Access kAccess, int kTile, Direction kDirection, typename T, typename Body>
__device__ __forceinline__ void for_pieces(T* row, int64_t columns, Body body) {
  T* const rows[] = {row};
  for_pieces_of<A, kAccess, kTile, kDirection>(
      rows, columns, [&](int64_t column, auto& numbers) { body(column, numbers[0]); }, row);
}

template <int n, typename V, typename Combine>
__device__ __forceinline__ void warp_reduce(V (&values)[n], Combine combine) {
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      values[k] = combine(values[k], __shfl_xor_sync(0xffffffffu, values[k], offset));
    }
  }
}

constexpr int kMaxWarps = 32;

// The first part of `block_reduce`, until its barrier. Reductions with one barrier share it.
template <int n, typename V, typename Combine>
__device__ __forceinline__ void reduce_before_barrier(V (&values)[n], V (*scratch)[kMaxWarps],
                                                      Combine combine) {
  warp_reduce(values, combine);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < n; ++k) scratch[k][threadIdx.x / 32] = values[k];
  }
}

// The part of `block_reduce` after its barrier.
template <int n, typename V, typename Combine>
__device__ __forceinline__ void reduce_after_barrier(V (&values)[n], V identity,
                                                     V (*scratch)[kMaxWarps], Combine combine) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < n; ++k) values[k] = lane < blockDim.x / 32 ? scratch[k][lane] : identity;
  warp_reduce(values, combine);
}

// Combines n values per thread over all threads, and returns the results to every thread. The order
// is fixed, so that two runs give the same bits. A kernel with several reductions gives each its
// own `scratch`, so that one barrier is enough.
template <int n, typename V, typename Combine>
__device__ __forceinline__ void block_reduce(V (&values)[n], V identity, V (*scratch)[kMaxWarps],
                                             Combine combine) {
  reduce_before_barrier(values, scratch, combine);
  __syncthreads();
  reduce_after_barrier(values, identity, scratch, combine);
}

}  // namespace storage_ops
