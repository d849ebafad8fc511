// CUDA C++ for a host compiler: the parts of language and runtime for a kernel and its launch.
// The compiler includes it before the kernel's source, as nvcc does with its own.
#pragma once

// After the definitions below, these headers would see a CUDA device.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>
#include <cstring>
#include <map>

#include "block.h"
#include "stable.h"

#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

using emulation::blockDim, emulation::blockIdx, emulation::gridDim, emulation::threadIdx;
using dim3 = emulation::Index;

// Vector types, aligned as on a GPU. The alignment sanitizer checks this at every access.
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(4) __half2 {
  _Float16 x, y;
};
struct alignas(4) __nv_bfloat162 {
  uint16_t x, y;
};

// Calls that wait have their source location as an argument, for messages.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::barrier({"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask = ~0u, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  emulation::exchange(mask, 0, true, {"__syncwarp", file, line});
}

inline unsigned __ballot_sync(unsigned mask, bool vote, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  const auto* votes = emulation::exchange(mask, vote, false, {"__ballot_sync", file, line});
  unsigned result = 0;
  for (unsigned lane = 0; lane < emulation::kLanes; ++lane) result |= unsigned(votes[lane]) << lane;
  return result;
}

template <typename V>
V __shfl_xor_sync(unsigned mask, V value, unsigned lanes, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  static_assert(sizeof(V) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const unsigned lane = threadIdx.x % emulation::kLanes;
  const auto* offered = emulation::exchange(mask, bits, false, {"__shfl_xor_sync", file, line});
  std::memcpy(&value, &offered[lane ^ lanes], sizeof value);
  return value;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float2 __half22float2(__half2 pair) {
  return {static_cast<float>(pair.x), static_cast<float>(pair.y)};
}

inline __half2 __floats2half2_rn(float x, float y) {
  return {static_cast<_Float16>(x), static_cast<_Float16>(y)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {torch::headeronly::detail::round_to_nearest_even(x),
          torch::headeronly::detail::round_to_nearest_even(y)};
}

namespace emulation {

// A result of an instruction with a relative error of up to `bound`. The bits of the exact result
// determine the error, so that equal operands have equal results.
inline float off_by(double bound, double exact) {
  uint64_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  const double part = static_cast<double>(bits * 0x9E3779B97F4A7C15u >> 11) / (1ull << 52) - 1;
  return static_cast<float>(exact * (1 + bound * part));
}

}  // namespace emulation

// NVIDIA documents 2 ulp for divisors that are not too large.
inline float __fdividef(float a, float b) {
  return emulation::off_by(1.5 * 0x1p-23, static_cast<double>(a) / b);
}

// The runtime. Streams are ignored, and a launch returns when the kernel has ended.
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9,
                      cudaErrorInvalidClusterSize = 912;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrReservedSharedMemoryPerBlock,
  cudaDevAttrClusterLaunch,
};

// Attributes of a small device, so that some of the tests' rows fill its cache, and others several
// times. The same holds for the shared memory of a block and of a cluster.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  constexpr int kValues[] = {4, 40 << 10, 18 << 10, 1 << 10, 1};
  *value = kValues[which];
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulation {

// The most blocks of a cluster, and bytes of shared memory of a block unless its kernel allows
// more.
constexpr uint64_t kMostBlocks = 8, kDynamicBytes = 4 << 10;

inline uint64_t volume(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }

inline dim3 cluster_of(const cudaLaunchConfig_t* config) {
  return config->numAttrs > 0 ? config->attrs->val.clusterDim : dim3{};
}

template <typename Kernel>
size_t& allowed_bytes(Kernel kernel) {
  static std::map<Kernel, size_t> bytes;
  return bytes.try_emplace(kernel, kDynamicBytes).first->second;
}

}  // namespace emulation

struct cudaFuncAttributes {
  int ptxVersion;  // of the GPU that the kernel was compiled for
};

template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* facts, void (*)(Parameters...)) {
  facts->ptxVersion = __CUDA_ARCH__ / 10;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  int most = 0, kept = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
  cudaDeviceGetAttribute(&kept, cudaDevAttrReservedSharedMemoryPerBlock, 0);
  if (value > most - kept) return cudaErrorInvalidValue;
  emulation::allowed_bytes(kernel) = value;
  return cudaSuccess;
}

// As on a GPU, fewer clusters than multiprocessors have room for, so that rows need several turns.
template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Parameters...),
                                           const cudaLaunchConfig_t*) {
  *count = 3;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using emulation::volume;
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  const dim3 cluster = emulation::cluster_of(config);
  if (grid.x > 0x7fffffff || grid.y > 0xffff || volume(grid) == 0 || volume(block) == 0 ||
      volume(block) > 1024 || grid.x % cluster.x != 0 || cluster.y != 1 || cluster.z != 1) {
    return cudaErrorInvalidConfiguration;
  }
  if (cluster.x > emulation::kMostBlocks) return cudaErrorInvalidClusterSize;
  if (config->dynamicSmemBytes > emulation::allowed_bytes(kernel)) return cudaErrorInvalidValue;
  emulation::launch({grid, block, cluster.x, config->dynamicSmemBytes},
                    [&] { kernel(arguments...); });
  return cudaSuccess;
}
