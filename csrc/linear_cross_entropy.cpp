// CPU row kernel of linear cross-entropy: a chunk of logits in, losses out, and the logits
// overwritten by their gradient. One read and one write of the chunk; a row is revisited in cache.
#include <algorithm>
#include <atomic>

#include "cross_entropy_rows.h"
#include "row_math.h"
#include "stable.h"

// The loops below are compiled for several instruction sets; the loader picks at run time.
#if defined(__x86_64__) && defined(__linux__)
#define STORAGE_OPS_MULTIVERSION \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define STORAGE_OPS_MULTIVERSION
#endif

namespace storage_ops {
namespace {

constexpr int64_t kBlock = 1024;  // elements handled at a time, in the first-level cache

// A block of logits in the type of the arithmetic, bias added.
template <typename T, typename A>
STORAGE_OPS_INLINE void load(const T* logits, const T* bias, A* block, int64_t n) {
  if (bias == nullptr) {
    for (int64_t j = 0; j < n; ++j) block[j] = static_cast<A>(logits[j]);
  } else {
    for (int64_t j = 0; j < n; ++j) block[j] = static_cast<A>(logits[j]) + static_cast<A>(bias[j]);
  }
}

template <typename A>
STORAGE_OPS_INLINE SoftmaxState<A> block_state(const A* block, int64_t n) {
  SoftmaxState<A> state;
  A max = state.max, sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; ++j) max = block[j] > max ? block[j] : max;
  const A shift = shift_of(max);
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += exponential(block[j] - shift);
  return {max, sum};
}

template <typename T, typename A>
STORAGE_OPS_INLINE A row_log_sum_exp(const T* row, const T* bias, int64_t columns) {
  alignas(64) A block[kBlock];
  SoftmaxState<A> state;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, columns - begin);
    load(row + begin, bias ? bias + begin : nullptr, block, n);
    state = merge(state, block_state(block, n));
  }
  return log_sum_exp(state);
}

template <typename T, typename A>
STORAGE_OPS_INLINE void row_gradient(T* row, const T* bias, int64_t columns, A lse, A scale) {
  alignas(64) A block[kBlock];
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, columns - begin);
    load(row + begin, bias ? bias + begin : nullptr, block, n);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) block[j] = gradient(block[j], lse, scale);
    for (int64_t j = 0; j < n; ++j) row[begin + j] = static_cast<T>(block[j]);
  }
}

// Multiversioned entry points, one pair per dtype: the attribute does not apply to templates.
#define STORAGE_OPS_ROW_LOOPS(T, A)                                                                \
  STORAGE_OPS_MULTIVERSION A lse_of(const T* row, const T* bias, int64_t n, A) {                   \
    return row_log_sum_exp<T, A>(row, bias, n);                                                    \
  }                                                                                                \
  STORAGE_OPS_MULTIVERSION void write_gradient(T* row, const T* bias, int64_t n, A lse, A scale) { \
    row_gradient<T, A>(row, bias, n, lse, scale);                                                  \
  }
STORAGE_OPS_ROW_LOOPS(double, double)
STORAGE_OPS_ROW_LOOPS(float, float)
STORAGE_OPS_ROW_LOOPS(BFloat16, float)
STORAGE_OPS_ROW_LOOPS(Half, float)

struct Rows {
  int64_t count, columns, stride;
  bool scale_per_row;
};

// Returns the first row whose target is out of range, or -1.
template <typename T, typename A, typename Index>
int64_t run(Rows rows, T* logits, const Index* target, const T* bias, const A* scale, A* nll,
            int64_t ignore_index, bool grad) {
  std::atomic<int64_t> bad{-1};
  torch::stable::parallel_for(0, rows.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = logits + i * rows.stride;
      const int64_t t = static_cast<int64_t>(target[i]);
      if (t == ignore_index) {
        nll[i] = 0;
        if (grad) std::fill(row, row + rows.columns, T(0));
        continue;
      }
      if (t < 0 || t >= rows.columns) {
        bad = i;
        continue;
      }
      const A lse = lse_of(row, bias, rows.columns, A());
      const A logit = static_cast<A>(row[t]) + (bias ? static_cast<A>(bias[t]) : A(0));
      nll[i] = negative_log_likelihood(lse, logit);
      if (!grad) continue;
      const A c = scale[rows.scale_per_row ? i : 0];
      write_gradient(row, bias, rows.columns, lse, c);
      row[t] = static_cast<T>(target_gradient(logit, lse, c));
    }
  });
  return bad;
}

void cross_entropy_rows(Tensor logits, Tensor target, std::optional<Tensor> bias, Tensor scale,
                        Tensor nll, int64_t ignore_index, bool grad) {
  check_rows(logits, target, bias, scale, nll);
  const Rows rows{logits.size(0), logits.size(1), logits.stride(0), scale.dim() == 1};
  for_dtypes(logits, target, [&](auto logit, auto arithmetic, auto index) {
    using T = decltype(logit);
    using A = decltype(arithmetic);
    const auto* t = static_cast<const decltype(index)*>(target.const_data_ptr());
    const int64_t bad = run(rows, static_cast<T*>(logits.mutable_data_ptr()), t,
                            bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
                            static_cast<const A*>(scale.const_data_ptr()),
                            static_cast<A*>(nll.mutable_data_ptr()), ignore_index, grad);
    STD_TORCH_CHECK(bad < 0, "linear_cross_entropy: target ", bad < 0 ? 0 : t[bad],
                    " is out of range; expected ignore_index (", ignore_index,
                    ") or a class index from 0 to ", rows.columns - 1);
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_cross_entropy_rows", TORCH_BOX(&storage_ops::cross_entropy_rows));
}
