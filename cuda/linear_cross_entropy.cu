// CUDA row kernel of linear cross-entropy, and its direct form. A block processes one row at a
// time. The first read of a row is for its sum, the second for its gradient. The second read goes
// backwards, so that it begins with data in the caches. The kernel does not wait for the host, and
// does not depend on the order of blocks. For a target out of range it reads no logit, and makes
// the sum and gradient nan. `streamed_rows.cuh` has the other form.
#include <algorithm>
#include <type_traits>

#include "rows.cuh"
#include "streamed_rows.cuh"

// Not anonymous, because nvcc would include its process number in the names.
namespace storage_ops::kernels {

// The most threads of a block. With 1024, double does not fit into the registers.
template <typename A>
constexpr int kThreads = sizeof(A) == 8 ? 512 : 1024;

// The L1 cache of a multiprocessor holds two rows of at most this many bytes. For such rows it gets
// two blocks with half of the threads. While one waits at a barrier, the other keeps memory busy.
constexpr int64_t kShortRow = 110 << 10;

// Packs that a thread loads before it uses the first. With one block of 1024 threads per
// multiprocessor, only these loads hide the memory latency.
template <bool kGeneral>
constexpr int kTile = kGeneral ? 2 : 4;

// Memory that the threads of a block share.
template <typename A>
struct Scratch {
  A max[1][kMaxWarps], sums[4][kMaxWarps];
  int64_t rank[1][kMaxWarps];
};

// A thread's state of the logits that it has read.
template <typename A>
struct Partial {
  RowState<A> state;
  unsigned best = 0;  // the pack of columns with the first maximum
};

// A row and the block that processes it. The general version supports the bias, smoothed targets,
// the entropy and the soft-cap. The other one keeps registers for loads in the common case.
template <bool kGeneral, typename T, typename A>
struct BlockRow {
  const RowArguments<T, A>& a;
  const int64_t i;
  T* const row;
  const Transform<A> transform;

  __device__ __forceinline__ BlockRow(const RowArguments<T, A>& args, int64_t index)
      : a(args),
        i(index),
        row(args.logits + index * args.stride),
        transform(kGeneral ? args.transform : Transform<A>{args.transform.scale, 0, 0}) {}

  // Turns n matrix products into logits.
  template <int n>
  __device__ __forceinline__ void transform_products(int64_t column, A (&z)[n]) const {
    if (kGeneral && (a.bias != nullptr || a.wide_bias != nullptr)) {
      A bias[n];
      if (a.bias != nullptr) {
        load(a.bias + column, bias);
      } else {
        load(a.wide_bias + column, bias);
      }
#pragma unroll
      for (int k = 0; k < n; ++k) z[k] += bias[k];
    }
#pragma unroll
    for (int k = 0; k < n; ++k) z[k] = transform.logit(z[k]);
  }

  __device__ __forceinline__ A logit(int64_t column) const {
    A z[] = {static_cast<A>(row[column])};
    transform_products(column, z);
    return z[0];
  }

  // The share of each of n classes in a smoothed target.
  template <int n>
  __device__ __forceinline__ void load_shares(int64_t column, A (&share)[n]) const {
    A weight[n];
#pragma unroll
    for (int k = 0; k < n; ++k) share[k] = 0, weight[k] = 1;
    if (a.probabilities) load(a.probabilities + i * a.probabilities_stride + column, share);
    if (a.weight != nullptr) load(a.weight + column, weight);
#pragma unroll
    for (int k = 0; k < n; ++k) share[k] = a.share_of(share[k], weight[k]);
  }

  // The column of the target, which is out of range if the target is in another tile.
  __device__ __forceinline__ int64_t target_column() const {
    return a.index ? a.index[i] - a.first_column : -1;
  }

  __device__ __forceinline__ bool has(int64_t column) const {
    return column >= 0 && column < a.columns;
  }

  __device__ __forceinline__ void fill(A value) const {
    for_pieces<A, kWrite, 1, kForwards>(row, a.columns, [&](int64_t, auto& numbers) {
#pragma unroll
      for (A& number : numbers) number = value;
    });
  }

  __device__ __forceinline__ Partial<A> read() const {
    Partial<A> own;
    RowState<A>& state = own.state;
    for_pieces<A, kRead, kTile<kGeneral>, kForwards>(row, a.columns, [&](int64_t column, auto& z) {
      transform_products(column, z);
      A max = z[0];
#pragma unroll
      for (const A& logit : z) max = maximum(max, logit);
      if (max > state.max()) own.best = static_cast<unsigned>(column / kPack<T>);
      state = moved(state, shift_of(maximum(max, state.max())));
#pragma unroll
      for (const A& logit : z) {
        const A e = exponential(logit - state.shift);
        state.sum += e;
        if (kGeneral && a.slope) state.slope += weighted(e, logit - state.shift);
      }
      if (kGeneral && a.spread()) {
        constexpr int n = std::extent_v<std::remove_reference_t<decltype(z)>>;
        A share[n];
        load_shares(column, share);
#pragma unroll
        for (int k = 0; k < n; ++k) {
          state.mass += share[k];
          state.dot += share[k] * (z[k] - state.shift);
        }
      }
    });
    return own;
  }

  // The state that all threads of the block share.
  __device__ __forceinline__ RowState<A> combine(const Partial<A>& own, Scratch<A>& scratch) const {
    A max[] = {own.state.max()};
    block_reduce(max, -std::numeric_limits<A>::infinity(), scratch.max,
                 [](A x, A y) { return maximum(x, y); });
    RowState<A> state = moved(own.state, shift_of(max[0]));
    const auto add = [](A x, A y) { return x + y; };
    if constexpr (kGeneral) {
      A sums[] = {state.sum, state.slope, state.dot, state.mass};
      block_reduce(sums, A(0), scratch.sums, add);
      return {state.shift, sums[0], sums[1], sums[2], sums[3]};
    } else {
      A sums[] = {state.sum};
      block_reduce(sums, A(0), scratch.sums, add);
      return {state.shift, sums[0], 0, 0, 0};
    }
  }

  // Writes the class of the first column with a nan, or else with the maximum.
  __device__ __forceinline__ void write_argmax(const RowState<A>& previous, const RowState<A>& all,
                                               const Partial<A>& own, Scratch<A>& scratch) const {
    const int64_t none = rank_of_none(a);
    int64_t rank[] = {none};
    A max = -std::numeric_limits<A>::infinity();
#pragma unroll 1
    for (int k = 0; own.state.max() == all.max() && k < kPack<T>; ++k) {
      const int64_t j = static_cast<int64_t>(own.best) * kPack<T> + k;
      const A z = j < a.columns ? logit(j) : max;
      if (z > max) {
        max = z;
        rank[0] = a.columns + j;
      }
    }
    if (all.max() != all.max()) {
      for (int64_t j = threadIdx.x; j < a.columns && rank[0] >= a.columns; j += blockDim.x) {
        const A z = logit(j);
        if (z != z) rank[0] = j;
      }
    }
    block_reduce(rank, none, scratch.rank, [](int64_t x, int64_t y) { return x < y ? x : y; });
    if (threadIdx.x == 0) store_argmax(a, i, previous, all, rank[0]);
  }

  __device__ __forceinline__ void overwrite(const RowGradient<A>& gradient) const {
    const bool spread = kGeneral && gradient.spread != 0 && a.spread();
    if (kGeneral && (spread || gradient.entropy != 0 || transform.softcap != 0)) {
      for_pieces<A, kReadWrite, kTile<true>, kBackwards>(
          row, a.columns, [&](int64_t column, auto& z) {
            constexpr int n = std::extent_v<std::remove_reference_t<decltype(z)>>;
            A share[n] = {};
            transform_products(column, z);
            if (spread) load_shares(column, share);
#pragma unroll
            for (int k = 0; k < n; ++k) {
              z[k] = gradient.at(z[k], share[k]) * transform.slope(z[k]);
            }
          });
    } else {
      const A factor = gradient.inverse_sum * gradient.probability * transform.scale;
      for_pieces<A, kReadWrite, kTile<false>, kBackwards>(
          row, a.columns, [&](int64_t column, auto& z) {
            transform_products(column, z);
#pragma unroll
            for (A& logit : z) logit = exponential(logit - gradient.shift) * factor;
          });
    }
  }
};

template <bool kGeneral, typename T, typename A>
__device__ __forceinline__ void work_on_row(const RowArguments<T, A>& a, int64_t i,
                                            Scratch<A>& scratch) {
  const BlockRow<kGeneral, T, A> block(a, i);
  const int64_t index = a.index ? a.index[i] : -1;
  const Target target = target_of(a, index);
  if (target != Target::kClass) {
    if (a.update && threadIdx.x == 0) store_without_class(a, i, target);
    if (a.grad || a.exponentials) block.fill(gradient_without_class<A>(target));
    return;
  }
  Partial<A> own;
  if (a.update) own = block.read();
  // Reads by several threads come before the barriers, and writes by one thread after them.
  RowState<A> state = a.load_state(i);
  const int64_t column = block.target_column();
  const bool has_target = block.has(column);
  const T product = has_target ? block.row[column] : T(0);
  if (a.update) {
    const RowState<A> all = block.combine(own, scratch);
    if (a.argmax != nullptr) block.write_argmax(state, all, own, scratch);
    state = merge(state, all);
  }
  __syncthreads();
  A logit[] = {static_cast<A>(product)};
  if (has_target) block.transform_products(column, logit);
  if (a.update && threadIdx.x == 0) {
    a.store_state(i, state);
    if (has_target) a.target_logit(i) = logit[0];
  }
  if (!a.grad && !a.exponentials) return;
  const RowGradient<A> gradient =
      gradient_of_row(a, state, a.grad ? a.load_upstream(i) : Upstream<A>());
  block.overwrite(gradient);
  if (!a.grad) return;
  __syncthreads();
  if (has_target && threadIdx.x == 0) {
    // Computed before p is rounded to 16 bits, because p - 1 would then lose most of its digits.
    const A share = kGeneral && a.spread() ? a.share(i, column) : A(0);
    const A value = gradient.at(logit[0], share) - gradient.target;
    block.row[column] = static_cast<T>(value * block.transform.slope(logit[0]));
  }
}

// When a row ends, all threads have read `scratch`, or have not used it. So the next row needs no
// barrier.
template <bool kGeneral, typename T, typename A>
__global__ void __launch_bounds__(kThreads<A>, 1)
    cross_entropy_rows_kernel(const __grid_constant__ RowArguments<T, A> a) {
  auto& scratch = shared_memory<Scratch<A>>();
  if constexpr (kGeneral) {  // it has no registers left for a loop
    work_on_row<kGeneral>(a, blockIdx.x, scratch);
  } else {
    for (int64_t i = blockIdx.x; i < a.rows; i += gridDim.x) work_on_row<kGeneral>(a, i, scratch);
  }
}

// The number of rows that are processed at a time. This is all rows, unless the second read of long
// rows would miss the L2 cache. Then it is as few as keep memory busy.
template <typename T, typename A>
int64_t rows_at_once(const RowArguments<T, A>& a, int32_t device) {
  if (!a.update || !(a.grad || a.exponentials)) return a.rows;  // rows are read only once
  const int64_t multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t cache = attribute(cudaDevAttrL2CacheSize, device) / 5 * 4;
  const int64_t cached = cache / std::max<int64_t>(a.columns * sizeof(T), 1);
  const bool helps = cached < multiprocessors && 2 * cached >= multiprocessors;
  return helps ? std::min(cached, a.rows) : a.rows;
}

template <bool kGeneral, typename T, typename A>
void launch_rows(const RowArguments<T, A>& a, const Tensor& logits) {
  // Short rows get fewer threads, so that each still has a full tile.
  constexpr int64_t kColumns = kTile<kGeneral> * kPack<T> * 32;  // columns of a warp
  const int64_t warps = (a.columns + kColumns - 1) / kColumns;
  const bool is_short = a.columns * static_cast<int64_t>(sizeof(T)) <= kShortRow;
  const int64_t most = kThreads<A> / 32 / (is_short ? 2 : 1);
  const auto threads = static_cast<unsigned>(32 * std::clamp<int64_t>(warps, 1, most));
  const int64_t blocks = kGeneral ? a.rows : rows_at_once(a, logits.get_device_index());
  launch(cross_entropy_rows_kernel<kGeneral, T, A>, {static_cast<unsigned>(blocks), threads},
         current_stream(logits), a);
}

// Bits of `phases`, with which a benchmark or a test asks for one of the forms.
enum Form : int64_t { kDirect = 16, kStreamed = 32 };

// The form of all other calls whose rows can be streamed. Only the direct one has been measured.
// "Short rows and long rows" in docs/design/loss-on-a-gpu.md predicts the times of both, and says
// how to choose. Then the other form, and this choice, are deleted for the rows that it loses.
constexpr Form kChosen = kDirect;

constexpr Form form_of(int64_t phases) {
  const int64_t asked = phases & (kDirect | kStreamed);
  return asked ? static_cast<Form>(asked) : kChosen;
}

template <typename T, typename A>
void launch_plain_rows(const RowArguments<T, A>& a, const Tensor& logits, Form form) {
  if constexpr (std::is_same_v<A, float>) {
    const Division division =
        form == kStreamed ? division_of(a, logits.get_device_index()) : Division{};
    if (division.blocks > 0) return launch_streamed_rows(a, division, logits);
  }
  launch_rows<false>(a, logits);
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
  STORAGE_OPS_CHECK(logits.size(0) <= std::numeric_limits<int32_t>::max(),
                    "_cross_entropy_rows: `logits` has more rows than a grid of blocks can have.");
  if (logits.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  for_dtypes("_cross_entropy_rows: logits", logits, [&](auto logit, auto arithmetic) {
    const auto a = row_arguments<decltype(logit), decltype(arithmetic)>(tensors, options);
    // With only the first three rows of upstream, the entropy has no gradient.
    const bool general = tensors.bias || a.spread() || a.slope || a.transform.softcap != 0 ||
                         (a.grad && a.upstream_count > 3);
    if (general) {
      launch_rows<true>(a, logits);
    } else {
      launch_plain_rows(a, logits, form_of(phases));
    }
  });
}

}  // namespace storage_ops::kernels

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_cross_entropy_rows", TORCH_BOX(&storage_ops::kernels::cross_entropy_rows));
}
