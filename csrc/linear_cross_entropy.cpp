// CPU row kernel of linear cross-entropy: a chunk of logits in, losses out, and the logits
// overwritten by their gradient. One read and one write of the chunk; a row is revisited in cache.
#include <algorithm>
#include <atomic>

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
#define STORAGE_OPS_ROW_LOOPS(T, A)                                                     \
  STORAGE_OPS_MULTIVERSION A lse_of(const T* row, const T* bias, int64_t n, A) {        \
    return row_log_sum_exp<T, A>(row, bias, n);                                         \
  }                                                                                     \
  STORAGE_OPS_MULTIVERSION void write_gradient(T* row, const T* bias, int64_t n, A lse, \
                                               A scale) {                               \
    row_gradient<T, A>(row, bias, n, lse, scale);                                       \
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

void check(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
           const Tensor& scale, const Tensor& nll, ScalarType arithmetic) {
  constexpr const char* kOp = "_cross_entropy_rows: ";
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) < 2), kOp,
                  "logits must be a matrix with contiguous rows");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == rows && target.is_contiguous(), kOp,
                  "target must be contiguous with one index per row of logits");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == columns && bias->is_contiguous() &&
                            bias->scalar_type() == logits.scalar_type()),
                  kOp, "bias must be contiguous, of logits' dtype, with one value per column");
  STD_TORCH_CHECK(scale.scalar_type() == arithmetic && scale.is_contiguous() &&
                      (scale.dim() == 0 || (scale.dim() == 1 && scale.size(0) == rows)),
                  kOp, "scale must be one value or one per row, in the dtype of the arithmetic");
  STD_TORCH_CHECK(nll.scalar_type() == arithmetic && nll.is_contiguous() && nll.dim() == 1 &&
                      nll.size(0) == rows,
                  kOp, "nll must be contiguous, one value per row, in the dtype of the arithmetic");
}

template <typename T, typename A>
void dispatch(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
              const Tensor& scale, const Tensor& nll, int64_t ignore_index, bool grad) {
  const Rows rows{logits.size(0), logits.size(1), logits.stride(0), scale.dim() == 1};
  auto* x = static_cast<T*>(logits.mutable_data_ptr());
  const auto* b = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  const auto* c = static_cast<const A*>(scale.const_data_ptr());
  auto* loss = static_cast<A*>(nll.mutable_data_ptr());
  const void* t = target.const_data_ptr();
  const bool wide = target.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || target.scalar_type() == ScalarType::Int,
                  "_cross_entropy_rows: target must be int32 or int64");
  const auto* narrow_target = static_cast<const int32_t*>(t);
  const auto* wide_target = static_cast<const int64_t*>(t);
  const int64_t bad = wide ? run(rows, x, wide_target, b, c, loss, ignore_index, grad)
                           : run(rows, x, narrow_target, b, c, loss, ignore_index, grad);
  STD_TORCH_CHECK(bad < 0, "linear_cross_entropy: target ",
                  bad < 0 ? 0 : wide ? wide_target[bad] : narrow_target[bad],
                  " is out of range; expected ignore_index (", ignore_index,
                  ") or a class index from 0 to ", rows.columns - 1);
}

void cross_entropy_rows(Tensor logits, Tensor target, std::optional<Tensor> bias, Tensor scale,
                        Tensor nll, int64_t ignore_index, bool grad) {
  const bool is_double = logits.scalar_type() == ScalarType::Double;
  check(logits, target, bias, scale, nll, is_double ? ScalarType::Double : ScalarType::Float);
  switch (logits.scalar_type()) {
    case ScalarType::Double:
      return dispatch<double, double>(logits, target, bias, scale, nll, ignore_index, grad);
    case ScalarType::Float:
      return dispatch<float, float>(logits, target, bias, scale, nll, ignore_index, grad);
    case ScalarType::BFloat16:
      return dispatch<BFloat16, float>(logits, target, bias, scale, nll, ignore_index, grad);
    case ScalarType::Half:
      return dispatch<Half, float>(logits, target, bias, scale, nll, ignore_index, grad);
    default:
      STD_TORCH_CHECK(false, "_cross_entropy_rows: logits must be float64, float32, bfloat16 or "
                             "float16");
  }
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_cross_entropy_rows", TORCH_BOX(&storage_ops::cross_entropy_rows));
}
