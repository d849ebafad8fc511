// CPU row kernel of linear_kl_div. It reads a tile of logits of each head. It writes the divergence
// and the statistics of whole rows, and overwrites one of the tiles with the student's gradient.
#include <algorithm>
#include <cstring>
#include <string>

#include "divergence_rows.h"
#include "row_blocks.h"

namespace storage_ops {
namespace {

template <typename T, typename A>
STORAGE_OPS_INLINE void load(const T* row, const A* bias, A scale, int64_t begin, int64_t n, A* z) {
  widen(row + begin, z, n);
  if (bias != nullptr) {
    for (int64_t j = 0; j < n; ++j) z[j] += bias[begin + j];
  }
  if (scale != 1) {
    for (int64_t j = 0; j < n; ++j) z[j] *= scale;
  }
}

// Sums over blocks are in double, so that they do not round more than the sums of one block.
template <typename T, typename A>
STORAGE_OPS_INLINE A log_sum_exp(const T* row, const A* bias, A scale, int64_t columns) {
  Block<A> block;
  A* z = block.values;
  A shift = -std::numeric_limits<A>::infinity();
  double total = 0;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, columns - begin);
    load(row, bias, scale, begin, n, z);
    A max = -std::numeric_limits<A>::infinity(), sum = 0;
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < n; ++j) max = z[j] > max ? z[j] : max;
    const A next = max > shift ? max : shift, base = std::isinf(next) && next < 0 ? A(0) : next;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; ++j) sum += exponential(z[j] - base);
    if (next > shift) total *= std::exp(static_cast<double>(shift) - next);
    total += sum;
    shift = next;
  }
  return shift + static_cast<A>(std::log(total));
}

template <typename A>
struct RowSums {
  A value, center;
};

// One pass over both tiles, which computes the sums of a row, its gradient, or both if possible.
template <Divergence kKind, bool kSums, typename T, typename A>
STORAGE_OPS_INLINE RowSums<double> pass(const DivergenceArguments<T, A>& arguments, int64_t i,
                                        bool grad, A center) {
  const T* row = arguments.logits + i * arguments.stride;
  const T* teacher = arguments.teacher + i * arguments.teacher_stride;
  T* gradient = arguments.gradient(i);
  const A lse = arguments.state[i], teacher_lse = arguments.state[arguments.state_stride + i];
  const A beta = arguments.beta, scale = arguments.scale;
  const A upstream = grad ? arguments.factor(i) : A(0);
  Block<A> blocks[5];
  A *a = blocks[0].values, *b = blocks[1].values, *p = blocks[2].values, *q = blocks[3].values;
  A* m = kKind == Divergence::kJsd ? blocks[4].values : q;
  RowSums<double> total{0, 0};
  for (int64_t begin = 0; begin < arguments.columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, arguments.columns - begin);
    load(row, arguments.bias, scale, begin, n, a);
    load(teacher, arguments.teacher_bias, scale, begin, n, b);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) a[j] -= lse;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) b[j] -= teacher_lse;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) p[j] = exponential(a[j]);
    if constexpr (kKind != Divergence::kReverse) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) q[j] = exponential(b[j]);
    }
    if constexpr (kKind == Divergence::kJsd) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) m[j] = log_mixture(p[j], q[j], beta);
    }
    if constexpr (kSums) {
      A value = 0, centers = 0;
#pragma omp simd reduction(+ : value)
      for (int64_t j = 0; j < n; ++j) {
        value += value_of<kKind>(a[j], b[j], p[j], q[j], m[j], beta);
      }
      if constexpr (kKind == Divergence::kJsd || kKind == Divergence::kTvd) {
#pragma omp simd reduction(+ : centers)
        for (int64_t j = 0; j < n; ++j) {
          centers += weighted(p[j], slope_of<kKind>(a[j], b[j], m[j]));
        }
      }
      total.value += value;
      total.center += centers;
    }
    if (grad) {
      // Rows of weight 0 have divergence and gradient 0, for any logits.
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const A dz = gradient_of<kKind>(a[j], b[j], p[j], q[j], m[j], beta, center) * upstream;
        a[j] = upstream == 0 ? A(0) : dz;
      }
      narrow(a, gradient + begin, n);
    }
  }
  return total;
}

template <Divergence kKind, typename T, typename A>
STORAGE_OPS_INLINE void run_row(const DivergenceArguments<T, A>& a, int64_t i) {
  A* state = a.state + i;
  A& center = state[2 * a.state_stride];
  if (a.update) {
    state[0] = log_sum_exp<T, A>(a.logits + i * a.stride, a.bias, a.scale, a.columns);
    state[a.state_stride] =
        log_sum_exp<T, A>(a.teacher + i * a.teacher_stride, a.teacher_bias, a.scale, a.columns);
    const auto sums = pass<kKind, true>(a, i, a.grad && at_once(kKind), A(0));
    a.loss[i] = static_cast<A>(sums.value);
    center = kKind == Divergence::kReverse ? a.loss[i] : static_cast<A>(sums.center);
  }
  if (a.grad && !(a.update && at_once(kKind))) pass<kKind, false>(a, i, true, center);
}

// Multiversioned entry points, one per dtype and divergence. The attribute does not apply to
// templates, and one function for all divergences takes twice as long to compile.
#define STORAGE_OPS_DIVERGENCE_OF(kind, T, A)                                               \
  STORAGE_OPS_MULTIVERSION void run_##kind(const DivergenceArguments<T, A>& a, int64_t i) { \
    run_row<Divergence::kind, T, A>(a, i);                                                  \
  }
#define STORAGE_OPS_DIVERGENCE(T, A)                                         \
  STORAGE_OPS_DIVERGENCE_OF(kForward, T, A)                                  \
  STORAGE_OPS_DIVERGENCE_OF(kReverse, T, A)                                  \
  STORAGE_OPS_DIVERGENCE_OF(kJsd, T, A)                                      \
  STORAGE_OPS_DIVERGENCE_OF(kTvd, T, A)                                      \
  void run(const DivergenceArguments<T, A>& a, Divergence kind, int64_t i) { \
    if (kind == Divergence::kForward) return run_kForward(a, i);             \
    if (kind == Divergence::kReverse) return run_kReverse(a, i);             \
    if (kind == Divergence::kJsd) return run_kJsd(a, i);                     \
    run_kTvd(a, i);                                                          \
  }
STORAGE_OPS_DIVERGENCE(double, double)
STORAGE_OPS_DIVERGENCE(float, float)
STORAGE_OPS_DIVERGENCE(BFloat16, float)
STORAGE_OPS_DIVERGENCE(Half, float)

void divergence_rows(Tensor logits, Tensor teacher, std::optional<Tensor> bias,
                     std::optional<Tensor> teacher_bias, Tensor state, Tensor loss,
                     std::optional<Tensor> upstream, std::string divergence, double beta,
                     double scale, int64_t phases, bool over_teacher) {
  const Divergence kind = divergence_of(divergence);
  const DivergenceTensors tensors{logits, teacher, bias, teacher_bias, state, loss, upstream};
  check_divergence(tensors, phases & kGradient);
  for_dtypes("_divergence_rows: logits", logits, [&](auto logit, auto arithmetic) {
    using T = decltype(logit);
    using A = decltype(arithmetic);
    const auto a = divergence_arguments<T, A>(tensors, beta, scale, phases, over_teacher);
    torch::stable::parallel_for(0, a.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(a, kind, i);
    });
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_divergence_rows", TORCH_BOX(&storage_ops::divergence_rows));
}
