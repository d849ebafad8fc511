// CUDA row kernel of linear cross-entropy: one block per row, 16-byte accesses. The row is read
// from memory once; its second read, for the gradient, hits the second-level cache. Nothing waits
// for the host, nothing depends on the order of blocks, and a target out of range touches no
// memory: it makes the row's loss and gradient nan.
#include "cross_entropy_rows.h"
#include "launch.cuh"
#include "row_math.h"

namespace storage_ops {
namespace {

// Threads of a block. With 1024, double arithmetic does not fit into its share of the registers.
template <typename A>
constexpr int kThreads = sizeof(A) == 8 ? 512 : 1024;

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename A>
struct BlockState : SoftmaxState<A> {
  __device__ __forceinline__ BlockState shuffle_down(int offset) const {
    BlockState other;
    other.max = __shfl_down_sync(0xffffffffu, this->max, offset);
    other.sum = __shfl_down_sync(0xffffffffu, this->sum, offset);
    return other;
  }
};

template <typename T, typename Index, typename A>
struct Arguments {
  T* logits;
  const Index* target;
  const T* bias;
  const A* scale;
  A* nll;
  int64_t columns, stride, ignore_index;
  bool scale_per_row, grad;
};

// Calls `body(first column, values, count)` for every pack of the row that this thread owns.
template <typename T, typename Body>
__device__ __forceinline__ void for_packs(T* row, int64_t columns, Body body) {
  using P = Pack<T>;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % sizeof(P) == 0;
  const int64_t whole = aligned ? columns / P::kSize * P::kSize : 0;
  for (int64_t j = static_cast<int64_t>(threadIdx.x) * P::kSize; j < whole;
       j += static_cast<int64_t>(blockDim.x) * P::kSize) {
    P pack = *reinterpret_cast<const P*>(row + j);
    if (body(j, pack.values, P::kSize)) *reinterpret_cast<P*>(row + j) = pack;
  }
  for (int64_t j = whole + threadIdx.x; j < columns; j += blockDim.x) {
    T value = row[j];
    if (body(j, &value, 1)) row[j] = value;
  }
}

template <typename A, typename T>
__device__ __forceinline__ A logit_of(T value, const T* bias, int64_t column) {
  return static_cast<A>(value) + (bias ? static_cast<A>(bias[column]) : A(0));
}

template <typename T, typename Index, typename A>
__global__ void __launch_bounds__(kThreads<A>)
    cross_entropy_rows_kernel(const Arguments<T, Index, A> args) {
  __shared__ BlockState<A> scratch[kThreads<A> / 32];
  const int64_t i = blockIdx.x;
  T* row = args.logits + i * args.stride;
  const int64_t target = static_cast<int64_t>(args.target[i]);
  const bool ignored = target == args.ignore_index;
  const bool inside = target >= 0 && target < args.columns;
  if (ignored || !inside) {
    const A value = ignored ? A(0) : std::numeric_limits<A>::quiet_NaN();
    if (threadIdx.x == 0) args.nll[i] = value;
    for (int64_t j = threadIdx.x; args.grad && j < args.columns; j += blockDim.x) {
      row[j] = static_cast<T>(value);
    }
    return;
  }
  BlockState<A> state;
  for_packs(row, args.columns, [&](int64_t column, T* values, int n) {
    BlockState<A> pack;
    for (int k = 0; k < n; ++k) {
      const A x = logit_of<A>(values[k], args.bias, column + k);
      pack.max = x > pack.max ? x : pack.max;
    }
    const A max = pack.max > state.max ? pack.max : state.max;
    const A shift = shift_of(max);
    state.sum *= exponential(state.max - shift);
    state.max = max;
    for (int k = 0; k < n; ++k) {
      state.sum += exponential(logit_of<A>(values[k], args.bias, column + k) - shift);
    }
    return false;
  });
  const A target_logit = logit_of<A>(row[target], args.bias, target);
  state = block_reduce(state, BlockState<A>(), scratch, [](BlockState<A> a, BlockState<A> b) {
    BlockState<A> both;
    static_cast<SoftmaxState<A>&>(both) = merge<A>(a, b);
    return both;
  });
  const A lse = log_sum_exp<A>(state);
  if (threadIdx.x == 0) args.nll[i] = negative_log_likelihood(lse, target_logit);
  if (!args.grad) return;
  const A scale = args.scale[args.scale_per_row ? i : 0];
  for_packs(row, args.columns, [&](int64_t column, T* values, int n) {
    for (int k = 0; k < n; ++k) {
      const A x = logit_of<A>(values[k], args.bias, column + k);
      const bool hit = column + k == target;
      values[k] = static_cast<T>(hit ? target_gradient(x, lse, scale) : gradient(x, lse, scale));
    }
    return true;
  });
}

template <typename T, typename A, typename Index>
void launch(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
            const Tensor& scale, const Tensor& nll, int64_t ignore_index, bool grad) {
  const Arguments<T, Index, A> args{static_cast<T*>(logits.mutable_data_ptr()),
                                    static_cast<const Index*>(target.const_data_ptr()),
                                    bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
                                    static_cast<const A*>(scale.const_data_ptr()),
                                    static_cast<A*>(nll.mutable_data_ptr()),
                                    logits.size(1),
                                    logits.stride(0),
                                    ignore_index,
                                    scale.dim() == 1,
                                    grad};
  const auto rows = static_cast<unsigned>(logits.size(0));
  if (rows == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  cross_entropy_rows_kernel<T, Index, A><<<rows, kThreads<A>, 0, current_stream(logits)>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void cross_entropy_rows(Tensor logits, Tensor target, std::optional<Tensor> bias, Tensor scale,
                        Tensor nll, int64_t ignore_index, bool grad) {
  check_rows(logits, target, bias, scale, nll);
  for_dtypes(logits, target, [&](auto logit, auto arithmetic, auto index) {
    launch<decltype(logit), decltype(arithmetic), decltype(index)>(logits, target, bias, scale, nll,
                                                                   ignore_index, grad);
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_cross_entropy_rows", TORCH_BOX(&storage_ops::cross_entropy_rows));
}
