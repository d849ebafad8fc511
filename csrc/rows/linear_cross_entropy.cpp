// CPU row kernel of linear cross-entropy. It reads a tile of matrix products, computes statistics
// of its rows, and overwrites the tile by its gradient. The tile is read and written once. Second
// reads of a row hit the cache.
#include <algorithm>
#include <type_traits>

#include "row_load.h"
#include "row_loops_avx512.h"

namespace storage_ops {
namespace {

template <typename A>
STORAGE_OPS_INLINE bool is_nan(A value) {
  return value != value;
}

// The share of each class of a block in a smoothed target.
template <typename T, typename A>
STORAGE_OPS_INLINE void load_shares(const RowArguments<T, A>& a, int64_t row, int64_t begin,
                                    int64_t n, A* share) {
  const A keep = a.keep, smooth = a.smooth;
  if (a.probabilities != nullptr) {
    const A* q = a.probabilities + row * a.probabilities_stride + begin;
    for (int64_t j = 0; j < n; ++j) share[j] = q[j] * keep + smooth;
  } else {
    std::fill(share, share + n, smooth);
  }
  if (a.weight != nullptr) {
    const A* weight = a.weight + begin;
    for (int64_t j = 0; j < n; ++j) share[j] *= weight[j];
  }
}

template <typename T, typename A>
STORAGE_OPS_INLINE RowState<A> state_of_block(const RowArguments<T, A>& a, int64_t row,
                                              int64_t begin, const A* z, int64_t n) {
  A max = -std::numeric_limits<A>::infinity(), sum = 0, slope = 0, dot = 0, mass = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; ++j) max = z[j] > max ? z[j] : max;
  const A shift = shift_of(max);
  if (a.slope) {
#pragma omp simd reduction(+ : sum, slope)
    for (int64_t j = 0; j < n; ++j) {
      const A e = exponential(z[j] - shift);
      sum += e;
      slope += weighted(e, z[j] - shift);
    }
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; ++j) sum += exponential(z[j] - shift);
  }
  if (a.spread()) {
    Block<A> share;
    load_shares(a, row, begin, n, share.values);
#pragma omp simd reduction(+ : dot, mass)
    for (int64_t j = 0; j < n; ++j) {
      mass += share.values[j];
      dot += share.values[j] * (z[j] - shift);
    }
  }
  const bool broken = std::isnan(sum) && std::any_of(z, z + n, is_nan<A>);
  return {broken ? sum : shift, sum, slope, dot, mass};
}

template <typename T, typename A>
STORAGE_OPS_INLINE RowState<A> update_row(const RowArguments<T, A>& a, int64_t i,
                                          RowState<A> state) {
  Block<A> block;
  A* z = block.values;
  for (int64_t begin = 0; begin < a.columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, a.columns - begin);
    load(a, i, begin, n, z);
    const RowState<A> next = state_of_block(a, i, begin, z, n);
    const bool first_nan = std::isnan(next.shift) && !std::isnan(state.shift);
    if (a.argmax != nullptr && (first_nan || next.max() > state.max())) {
      const A* best =
          first_nan ? std::find_if(z, z + n, is_nan<A>) : std::find(z, z + n, next.shift);
      a.argmax[i] = a.first_column + begin + (best - z);
    }
    state = merge(state, next);
  }
  return state;
}

template <typename T, typename A>
STORAGE_OPS_INLINE void overwrite_row(const RowArguments<T, A>& a, int64_t i,
                                      const RowGradient<A> gradient) {
  Block<A> block, share;
  A* z = block.values;
  T* row = a.logits + i * a.stride;
  const Transform<A> transform = a.transform;
  const bool spread = gradient.spread != 0 && a.spread();
  const bool full = spread || gradient.entropy != 0 || transform.softcap != 0;
  if (full && !spread) std::fill(share.values, share.values + std::min(kBlock, a.columns), A(0));
  for (int64_t begin = 0; begin < a.columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, a.columns - begin);
    load(a, i, begin, n, z);
    if (spread) load_shares(a, i, begin, n, share.values);
    if (full) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        z[j] = gradient.at(z[j], share.values[j]) * transform.slope(z[j]);
      }
    } else {
      const A shift = gradient.shift;
      const A factor = gradient.inverse_sum * gradient.probability * transform.scale;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) z[j] = exponential(z[j] - shift) * factor;
    }
    narrow(z, row + begin, n);
  }
}

// Multiversioned entry points, one pair per dtype, because the attribute does not apply to
// templates.
#define STORAGE_OPS_ROW_LOOPS(T, A)                                                   \
  STORAGE_OPS_MULTIVERSION RowState<A> update(const RowArguments<T, A>& a, int64_t i, \
                                              RowState<A> state) {                    \
    return update_row<T, A>(a, i, state);                                             \
  }                                                                                   \
  STORAGE_OPS_MULTIVERSION void overwrite(const RowArguments<T, A>& a, int64_t i,     \
                                          const RowGradient<A>& gradient) {           \
    overwrite_row<T, A>(a, i, gradient);                                              \
  }
STORAGE_OPS_ROW_LOOPS(double, double)
STORAGE_OPS_ROW_LOOPS(float, float)
STORAGE_OPS_ROW_LOOPS(BFloat16, float)
STORAGE_OPS_ROW_LOOPS(Half, float)

// Returns true if logits are unchanged products, and targets are not smoothed.
template <typename T, typename A>
bool is_bare(const RowArguments<T, A>& a) {
  return a.bias == nullptr && a.wide_bias == nullptr && a.transform.softcap == 0 &&
         a.transform.scale == 1 && !a.spread();
}

// Uses the loops for AVX-512 with BF16 if they apply and the processor supports them.
template <typename T, typename A>
bool update_fast([[maybe_unused]] const RowArguments<T, A>& a, [[maybe_unused]] int64_t i,
                 [[maybe_unused]] RowState<A>& state) {
#if defined(STORAGE_OPS_X86)
  if constexpr (std::is_same_v<A, float>) {
    if (level() >= kAvx512Bf16 && is_bare(a) && !a.slope && a.argmax == nullptr)
      return avx512::update(a.logits + i * a.stride, a.columns, state);
  }
#endif
  return false;
}

template <typename T, typename A>
bool overwrite_fast([[maybe_unused]] const RowArguments<T, A>& a, [[maybe_unused]] int64_t i,
                    [[maybe_unused]] const RowGradient<A>& gradient) {
#if defined(STORAGE_OPS_X86)
  if constexpr (std::is_same_v<A, float>) {
    if (level() >= kAvx512Bf16 && is_bare(a) && gradient.entropy == 0) {
      const float factor = gradient.inverse_sum * gradient.probability;
      avx512::overwrite(a.logits + i * a.stride, a.columns, gradient.shift, factor);
      return true;
    }
  }
#endif
  return false;
}

template <typename T, typename A>
void run_row(const RowArguments<T, A>& a, int64_t i) {
  T* row = a.logits + i * a.stride;
  const int64_t index = a.index ? a.index[i] : -1;
  if (a.index != nullptr && index == a.ignore_index) {
    if (a.update) {
      a.store_state(i, {0, 1, 0, 0, 0});
      a.target_logit(i) = 0;
      if (a.argmax != nullptr) a.argmax[i] = -1;
    }
    if (a.grad || a.exponentials) std::fill(row, row + a.columns, T(0));
    return;
  }
  const int64_t column = a.index ? index - a.first_column : -1;
  const bool has_target = column >= 0 && column < a.columns;
  const A logit = has_target ? a.logit(row[column], column) : A(0);
  RowState<A> state = a.load_state(i);
  if (a.update) {
    if (!update_fast(a, i, state)) state = update(a, i, state);
    a.store_state(i, state);
    if (has_target) a.target_logit(i) = logit;
  }
  if (a.grad) {
    const RowGradient<A> gradient(state, a.load_upstream(i));
    if (!overwrite_fast(a, i, gradient)) overwrite(a, i, gradient);
    if (has_target) {
      // Computed before p is rounded to 16 bits, because p - 1 would then lose most of its digits.
      const A share = a.spread() ? a.share(i, column) : A(0);
      const A value = gradient.at(logit, share) - gradient.target;
      row[column] = static_cast<T>(value * a.transform.slope(logit));
    }
  } else if (a.exponentials) {
    RowGradient<A> gradient(state, {});
    gradient.inverse_sum = gradient.probability = 1;
    if (!overwrite_fast(a, i, gradient)) overwrite(a, i, gradient);
  }
}

// Returns the first row whose target is out of range, or -1.
template <typename T, typename A>
int64_t first_bad_row(const RowArguments<T, A>& a) {
  for (int64_t i = 0; a.index != nullptr && i < a.rows; ++i) {
    const int64_t t = a.index[i];
    if (t != a.ignore_index && (t < 0 || t >= a.vocabulary)) return i;
  }
  return -1;
}

void cross_entropy_rows(Tensor logits, Tensor target, std::optional<Tensor> bias,
                        std::optional<Tensor> weight, std::optional<Tensor> upstream, Tensor state,
                        std::optional<Tensor> argmax, int64_t first_column, int64_t vocabulary,
                        int64_t ignore_index, double softcap, double logit_scale,
                        double label_smoothing, int64_t phases) {
  const RowTensors tensors{logits, target, bias, weight, upstream, state, argmax};
  const RowOptions options{first_column, vocabulary,      ignore_index, softcap,
                           logit_scale,  label_smoothing, phases};
  check_rows(tensors, phases & kGradient);
  for_dtypes("_cross_entropy_rows: logits", logits, [&](auto logit, auto arithmetic) {
    const auto a = row_arguments<decltype(logit), decltype(arithmetic)>(tensors, options);
    const int64_t bad = first_bad_row(a);
    STORAGE_OPS_CHECK(bad < 0, "linear_cross_entropy: `target` ", bad < 0 ? 0 : a.index[bad],
                      " is out of range. Expected ignore_index (", ignore_index,
                      ") or a class index from 0 to ", vocabulary - 1, ".");
    torch::stable::parallel_for(0, a.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_row(a, i);
    });
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_cross_entropy_rows", TORCH_BOX(&storage_ops::cross_entropy_rows));
}
