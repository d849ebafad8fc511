// Loads logits from the products in a tile, block by block.
#pragma once

#include "cross_entropy_rows.h"
#include "row_blocks.h"

namespace storage_ops {
namespace {

// A block of logits in the arithmetic type.
template <typename T, typename A>
STORAGE_OPS_INLINE void load(const RowArguments<T, A>& a, int64_t row, int64_t begin, int64_t n,
                             A* z) {
  const T* products = a.logits + row * a.stride + begin;
  // The hardware prefetches only within a page, and a block is about a page.
  const auto* ahead = reinterpret_cast<const char*>(products + kBlock);
  const size_t bytes = n * sizeof(T);
  for (size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + byte);
  widen(products, z, n);
  if (a.bias != nullptr) {
    Block<A> bias;
    widen(a.bias + begin, bias.values, n);
    for (int64_t j = 0; j < n; ++j) z[j] += bias.values[j];
  } else if (a.wide_bias != nullptr) {
    const A* bias = a.wide_bias + begin;
    for (int64_t j = 0; j < n; ++j) z[j] += bias[j];
  }
  const Transform<A> transform = a.transform;
  if (transform.softcap != 0) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) z[j] = transform.logit(z[j]);
  } else if (transform.scale != 1) {
    for (int64_t j = 0; j < n; ++j) z[j] *= transform.scale;
  }
}

}  // namespace
}  // namespace storage_ops
