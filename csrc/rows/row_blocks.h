// Blocks of a row of logits in a CPU's first-level cache, in the arithmetic type.
#pragma once

#include <algorithm>
#include <cstring>

#include "dtypes.h"
#include "row_math.h"

// Loops with this mark are compiled for several instruction sets. The loader chooses at run time.
#if defined(__x86_64__) && defined(__linux__)
#define STORAGE_OPS_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define STORAGE_OPS_MULTIVERSION
#endif

namespace storage_ops {
namespace {

constexpr int64_t kBlock = 1024;  // elements per block, which fits into the first-level cache

template <typename A>
struct alignas(64) Block {
  A values[kBlock];
};

// Conversions that compilers vectorize.
template <typename A>
STORAGE_OPS_INLINE void widen(const A* from, A* to, int64_t n) {
  std::copy(from, from + n, to);
}

STORAGE_OPS_INLINE void widen(const BFloat16* from, float* to, int64_t n) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t wide = static_cast<uint32_t>(bits[j]) << 16;
    std::memcpy(to + j, &wide, sizeof wide);
  }
}

template <typename A>
STORAGE_OPS_INLINE void narrow(const A* from, A* to, int64_t n) {
  std::copy(from, from + n, to);
}

// Rounds to nearest, ties to even. Every nan becomes the same one.
STORAGE_OPS_INLINE void narrow(const float* from, BFloat16* to, int64_t n) {
  auto* bits = reinterpret_cast<uint16_t*>(to);
  for (int64_t j = 0; j < n; ++j) {
    uint32_t wide;
    std::memcpy(&wide, from + j, sizeof wide);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    bits[j] = static_cast<uint16_t>((wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

// The compiler's name for half precision, if the processor has it. Before GCC 13, C++ on Arm has
// only __fp16.
#if defined(__ARM_FP16_FORMAT_IEEE)
#define STORAGE_OPS_HALF __fp16
#elif defined(__FLT16_MAX__)
#define STORAGE_OPS_HALF _Float16
#endif

#if defined(STORAGE_OPS_HALF)
STORAGE_OPS_INLINE void widen(const Half* from, float* to, int64_t n) {
  const auto* half = reinterpret_cast<const STORAGE_OPS_HALF*>(from);
  for (int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(half[j]);
}

STORAGE_OPS_INLINE void narrow(const float* from, Half* to, int64_t n) {
  auto* half = reinterpret_cast<STORAGE_OPS_HALF*>(to);
  for (int64_t j = 0; j < n; ++j) half[j] = static_cast<STORAGE_OPS_HALF>(from[j]);
}
#else
STORAGE_OPS_INLINE void widen(const Half* from, float* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(from[j]);
}

STORAGE_OPS_INLINE void narrow(const float* from, Half* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = static_cast<Half>(from[j]);
}
#endif

}  // namespace
}  // namespace storage_ops
