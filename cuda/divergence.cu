// CUDA row kernel of linear_kl_div. A block processes one row of both heads at a time. The first
// pass computes both log-sum-exps, the second the divergence, the third the gradient. Each pass
// starts at the end where the one before stopped, so that it first reads data in the caches.
#include <algorithm>
#include <cmath>
#include <string>

#include "launch.cuh"
#include "rows/divergence_rows.h"

// Not anonymous, because nvcc would include its process number in the names.
namespace storage_ops::kernels {

// The most threads of a block, and packs of each head that a thread loads before it uses them.
constexpr int kPairThreads = 512, kPairTile = 2;

template <typename A>
struct PairScratch {
  A max[2][kMaxWarps], sums[2][kMaxWarps], totals[2][kMaxWarps];
};

template <typename A>
struct LogSumExps {
  A student, teacher;
};

// A row of both heads, and the block that processes it.
template <Divergence kKind, typename T, typename A>
struct PairOfRows {
  const DivergenceArguments<T, A>& a;
  const int64_t i;
  T* const rows[2];

  __device__ __forceinline__ PairOfRows(const DivergenceArguments<T, A>& args, int64_t index)
      : a(args),
        i(index),
        rows{args.logits + index * args.stride, args.teacher + index * args.teacher_stride} {}

  // Turns n matrix products of each head into logits.
  template <int n>
  __device__ __forceinline__ void to_logits(int64_t column, A (&z)[2][n]) const {
    const A* const biases[] = {a.bias, a.teacher_bias};
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      if (biases[head] != nullptr) {
        A bias[n];
        load(biases[head] + column, bias);
#pragma unroll
        for (int k = 0; k < n; ++k) z[head][k] += bias[k];
      }
#pragma unroll
      for (int k = 0; k < n; ++k) z[head][k] *= a.scale;
    }
  }

  __device__ __forceinline__ LogSumExps<A> log_sum_exps(PairScratch<A>& scratch) const {
    RowState<A> own[2];
    const auto add_up = [&](int64_t column, auto& z) {
      to_logits(column, z);
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        A max = own[head].max();
#pragma unroll
        for (const A& logit : z[head]) max = maximum(max, logit);
        own[head] = moved(own[head], shift_of(max));
#pragma unroll
        for (const A& logit : z[head]) own[head].sum += exponential(logit - own[head].shift);
      }
    };
    for_pieces_of<A, kRead, kPairTile, kForwards>(rows, a.columns, add_up, rows[0]);
    A max[] = {own[0].max(), own[1].max()};
    block_reduce(max, -std::numeric_limits<A>::infinity(), scratch.max,
                 [](A x, A y) { return maximum(x, y); });
    A sums[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) sums[head] = moved(own[head], shift_of(max[head])).sum;
    block_reduce(sums, A(0), scratch.sums, [](A x, A y) { return x + y; });
    return {shift_of(max[0]) + std::log(sums[0]), shift_of(max[1]) + std::log(sums[1])};
  }

  // One pass: the sums of this thread's classes, or their gradient, or both if possible.
  template <bool kSums, bool kGrad, Direction kDirection>
  __device__ __forceinline__ void pass(const LogSumExps<A>& lse, A center, A (&sums)[2]) const {
    const A factor = kGrad ? a.factor(i) : A(0);
    for_pieces_of<A, kGrad ? kReadWrite : kRead, kPairTile, kDirection>(
        rows, a.columns,
        [&](int64_t column, auto& z) {
          to_logits(column, z);
#pragma unroll
          for (int k = 0; k < static_cast<int>(std::size(z[0])); ++k) {
            const A of_student = z[0][k] - lse.student;
            const A of_teacher = z[1][k] - lse.teacher;
            const A p = exponential(of_student);
            const A q = kKind == Divergence::kReverse ? A(0) : exponential(of_teacher);
            const A m = kKind == Divergence::kJsd ? log_mixture(p, q, a.beta) : A(0);
            if constexpr (kSums) {
              sums[0] += value_of<kKind>(of_student, of_teacher, p, q, m, a.beta);
              sums[1] += weighted(p, slope_of<kKind>(of_student, of_teacher, m));
            }
            if constexpr (kGrad) {
              const A dz = gradient_of<kKind>(of_student, of_teacher, p, q, m, a.beta, center);
              z[0][k] = factor == 0 ? A(0) : dz * factor;  // for any logits
            }
          }
        },
        a.gradient(i));
  }
};

template <Divergence kKind, typename T, typename A>
__global__ void __launch_bounds__(kPairThreads, 1)
    divergence_rows_kernel(const __grid_constant__ DivergenceArguments<T, A> a) {
  auto& scratch = shared_memory<PairScratch<A>>();
  const int64_t i = blockIdx.x;
  const PairOfRows<kKind, T, A> rows(a, i);
  A* const state = a.state + i;
  A sums[2] = {0, 0};
  if (!a.update) {
    const LogSumExps<A> lse{state[0], state[a.state_stride]};
    rows.template pass<false, true, kForwards>(lse, state[2 * a.state_stride], sums);
    return;
  }
  const LogSumExps<A> lse = rows.log_sum_exps(scratch);
  if (at_once(kKind) && a.grad) {
    rows.template pass<true, true, kBackwards>(lse, A(0), sums);
  } else {
    rows.template pass<true, false, kBackwards>(lse, A(0), sums);
  }
  block_reduce(sums, A(0), scratch.totals, [](A x, A y) { return x + y; });
  const A center = kKind == Divergence::kForward   ? A(0)
                   : kKind == Divergence::kReverse ? sums[0]
                                                   : sums[1];
  if (threadIdx.x == 0) {
    a.loss[i] = sums[0];
    state[0] = lse.student;
    state[a.state_stride] = lse.teacher;
    state[2 * a.state_stride] = center;
  }
  if (!at_once(kKind) && a.grad) rows.template pass<false, true, kForwards>(lse, center, sums);
}

template <typename T, typename A>
auto kernel_of(Divergence kind) {
  switch (kind) {
    case Divergence::kForward:
      return divergence_rows_kernel<Divergence::kForward, T, A>;
    case Divergence::kReverse:
      return divergence_rows_kernel<Divergence::kReverse, T, A>;
    case Divergence::kJsd:
      return divergence_rows_kernel<Divergence::kJsd, T, A>;
    default:
      return divergence_rows_kernel<Divergence::kTvd, T, A>;
  }
}

void divergence_rows(Tensor logits, Tensor teacher, std::optional<Tensor> bias,
                     std::optional<Tensor> teacher_bias, Tensor state, Tensor loss,
                     std::optional<Tensor> upstream, std::string divergence, double beta,
                     double scale, int64_t phases, bool over_teacher) {
  const Divergence kind = divergence_of(divergence);
  const DivergenceTensors tensors{logits, teacher, bias, teacher_bias, state, loss, upstream};
  check_divergence(tensors, phases & kGradient);
  STORAGE_OPS_CHECK(logits.size(0) <= std::numeric_limits<int32_t>::max(),
                    "_divergence_rows: `logits` has more rows than a grid of blocks can have.");
  if (logits.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  for_dtypes("_divergence_rows: logits", logits, [&](auto logit, auto arithmetic) {
    using T = decltype(logit);
    using A = decltype(arithmetic);
    const auto a = divergence_arguments<T, A>(tensors, beta, scale, phases, over_teacher);
    // Short rows get fewer threads, so that each still has a full tile.
    constexpr int64_t kColumns = kPairTile * kPack<T> * 32;  // columns of a warp
    const int64_t warps = (a.columns + kColumns - 1) / kColumns;
    const auto threads =
        static_cast<unsigned>(32 * std::clamp<int64_t>(warps, 1, kPairThreads / 32));
    launch(kernel_of<T, A>(kind), {static_cast<unsigned>(a.rows), threads}, current_stream(logits),
           a);
  });
}

}  // namespace storage_ops::kernels

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_divergence_rows", TORCH_BOX(&storage_ops::kernels::divergence_rows));
}
