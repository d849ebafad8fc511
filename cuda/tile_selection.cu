// GPU kernels for choosing the classes of a gradient: sums of a tile's probabilities or numbers,
// gathers of some rows and columns or their gradient, and the scatter of products into rows of the
// weight's gradient. Sums have a fixed order, so that two runs give the same bits.
#include <algorithm>

#include "launch.cuh"
#include "rows/tile_sums.h"

namespace storage_ops::kernels {

// A double takes twice the shared memory.
template <typename A>
constexpr unsigned kSumThreads = sizeof(A) == 8 ? 128 : 256;
constexpr unsigned kGatherThreads = 256;

template <typename A>
struct BucketScratch {
  A sums[kBuckets][kSumThreads<A>];
};

template <typename A>
struct ColumnScratch {
  A sums[kSumThreads<A> / 32][32 * (16 / sizeof(uint16_t))];
};

// Turns n products of a row into summands.
template <int n, typename T, typename A>
__device__ __forceinline__ void summands(const Summed<T, A>& s, int64_t row, int64_t column,
                                         A (&z)[n]) {
  A bias[n] = {};
  if (s.tile.bias != nullptr) load(s.tile.bias + column, bias);
  if (s.tile.wide_bias != nullptr) load(s.tile.wide_bias + column, bias);
#pragma unroll
  for (int k = 0; k < n; ++k) z[k] = s.number(s.tile.transform.logit(z[k] + bias[k]), row);
}

// A block adds up the columns of a row by bucket. Every thread has its own sum for each bucket.
template <typename T, typename A>
__global__ void __launch_bounds__(kSumThreads<A>)
    bucket_sums_kernel(const __grid_constant__ Summed<T, A> s) {
  auto& scratch = shared_memory<BucketScratch<A>>();
  const int64_t row = blockIdx.x;
  for (int64_t b = 0; b < s.buckets; ++b) scratch.sums[b][threadIdx.x] = 0;
  for_pieces<A, kRead, 2, kForwards>(
      s.tile.logits + row * s.tile.stride, s.tile.columns, [&](int64_t column, auto& z) {
        constexpr int n = std::extent_v<std::remove_reference_t<decltype(z)>>;
        summands(s, row, column, z);
#pragma unroll
        for (int k = 0; k < n; ++k) {
          const uint8_t bucket = s.bucket[column + k];
          if (bucket < s.buckets) scratch.sums[bucket][threadIdx.x] += z[k];
        }
      });
  __syncthreads();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t b = warp; b < s.buckets; b += blockDim.x / 32) {
    A sum[] = {0};
    for (unsigned t = lane; t < blockDim.x; t += 32) sum[0] += scratch.sums[b][t];
    warp_reduce(sum, [](A x, A y) { return x + y; });
    if (lane == 0) s.out[row * s.buckets + b] = sum[0];
  }
}

// Each lane adds up a pack of columns. The warps of a block take its rows in turn.
template <typename T, typename A>
__global__ void __launch_bounds__(kSumThreads<A>)
    column_sums_kernel(const __grid_constant__ Summed<T, A> s) {
  auto& scratch = shared_memory<ColumnScratch<A>>();
  constexpr int n = kPack<T>;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * n;
  A sums[n] = {};
  if (first < s.tile.columns) {
    for (int64_t row = warp; row < s.tile.rows; row += warps) {
      const T* from = s.tile.logits + row * s.tile.stride + first;
      if (first + n <= s.tile.columns) {
        A z[n];
        load(from, z);
        summands(s, row, first, z);
#pragma unroll
        for (int k = 0; k < n; ++k) sums[k] += z[k];
      } else {
        for (int64_t k = 0; first + k < s.tile.columns; ++k) {
          A z[1];
          load(from + k, z);
          summands(s, row, first + k, z);
          sums[k] += z[0];
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < n; ++k) scratch.sums[warp][lane * n + k] = sums[k];
  __syncthreads();
  for (unsigned j = threadIdx.x; j < 32 * n; j += blockDim.x) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 * n + j;
    A sum = 0;
    for (unsigned w = 0; w < warps; ++w) sum += scratch.sums[w][j];
    if (column < s.tile.columns) s.out[column] = sum;
  }
}

void tile_sums(Tensor out, Tensor tile, std::optional<Tensor> lse, std::optional<Tensor> row_weight,
               std::optional<Tensor> bias, std::optional<Tensor> bucket, double softcap,
               double logit_scale, bool absolute, bool slope) {
  check_sums(out, tile, lse, row_weight, bias, bucket);
  STORAGE_OPS_CHECK(tile.size(0) <= std::numeric_limits<int32_t>::max(),
                    "_tile_sums: `tile` has more rows than a grid of blocks can have.");
  if (out.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tile.get_device_index());
  for_dtypes("_tile_sums: tile", tile, [&](auto number, auto arithmetic) {
    using T = decltype(number);
    using A = decltype(arithmetic);
    const auto s = summed<T, A>(out, tile, lse, row_weight, bias, bucket, softcap, logit_scale,
                                absolute, slope);
    const cudaStream_t stream = current_stream(tile);
    if (s.bucket != nullptr) {
      const auto rows = static_cast<unsigned>(s.tile.rows);
      launch(bucket_sums_kernel<T, A>, {rows, kSumThreads<A>}, stream, s);
    } else {
      constexpr int64_t kColumns = 32 * kPack<T>;
      const auto blocks = static_cast<unsigned>((s.tile.columns + kColumns - 1) / kColumns);
      launch(column_sums_kernel<T, A>, {blocks, kSumThreads<A>}, stream, s);
    }
  });
}

constexpr int kGatherColumns = 64;  // columns of a block
// Tokens whose gradients a block gathers at a time. A double takes twice the shared memory.
template <typename A>
constexpr int kGatherTokens = sizeof(A) == 8 ? 32 : 64;

template <typename A>
struct GatherScratch {
  A numbers[2][kGatherColumns][kGatherTokens<A> + 1];  // two buffers, so that one barrier is enough
  int64_t start[kGatherColumns], count[kGatherColumns];
};

// A block reads some columns of all tokens, row by row, and writes them column by column.
template <typename T, typename O, typename A>
__global__ void __launch_bounds__(kGatherThreads, sizeof(A) == 8 ? 2 : 4)
    gather_gradient_kernel(const __grid_constant__ GatheredGradient<T, O, A> g) {
  auto& scratch = shared_memory<GatherScratch<A>>();
  constexpr int n = kPack<T>, kPacks = kGatherColumns / n, kTokens = kGatherTokens<A>;
  constexpr int kWarpColumns =
      kGatherColumns / (kGatherThreads / 32);  // columns that a warp writes
  const auto& tile = g.numbers.tile;
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * kWarpColumns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatherColumns;
  const int64_t left = tile.columns - first;
  const int columns = left < kGatherColumns ? static_cast<int>(left) : kGatherColumns;
  if (threadIdx.x < kGatherColumns) {
    const bool inside = static_cast<int>(threadIdx.x) < columns;
    const int64_t start = inside ? g.start[first + threadIdx.x] : -1;
    scratch.start[threadIdx.x] = start;
    scratch.count[threadIdx.x] = start < 0 ? 0 : g.count[first + threadIdx.x];
  }
  __syncthreads();
  int64_t most = 0;
  for (int c = 0; c < columns; ++c) most = most < scratch.count[c] ? scratch.count[c] : most;
  A sums[kWarpColumns] = {};
  for (int64_t begin = 0, half = 0; begin < most; begin += kTokens, half = 1 - half) {
    auto& numbers = scratch.numbers[half];
#pragma unroll
    for (int p = threadIdx.x; p < kTokens * kPacks; p += kGatherThreads) {
      const int i = p / kPacks, c = p % kPacks * n;
      const int64_t row = begin + i < most ? g.token[begin + i] : -1;
      if (row < 0 || row >= tile.rows || c >= columns) continue;
      const T* from = tile.logits + row * tile.stride + first + c;
      A z[n] = {};
      if (c + n <= columns) {
        load(from, z);
      } else {
        for (int k = 0; c + k < columns; ++k) z[k] = static_cast<A>(from[k]);
      }
#pragma unroll
      for (int k = 0; k < n; ++k) numbers[c + k][i] = z[k];
    }
    __syncthreads();
    for (int token = lane; token < kTokens; token += 32) {
      const int64_t i = begin + token, row = i < most ? g.token[i] : -1;
      if (row < 0 || row >= tile.rows) continue;
      const bool logits = g.numbers.lse != nullptr;
      const A lse = logits ? g.numbers.lse[row] : A(0);
      const A factor = logits ? g.numbers.row_weight[row] : A(0);
      const int64_t target = logits ? g.target[row] - first : -1;
#pragma unroll
      for (int k = 0; k < kWarpColumns; ++k) {
        const int c = own + k;
        if (i >= scratch.count[c]) continue;
        A value = numbers[c][token];
        const A logit = logits ? tile.logit(value, first + c) : A(0);
        if (logits) value = g.number(logit, lse, factor);
        sums[k] += value < 0 ? -value : value;
        if (c == target) value = g.target_number(logit, row);
        g.out[scratch.start[c] + i] = static_cast<O>(value);
      }
    }
  }
  if (g.sums == nullptr) return;
#pragma unroll
  for (int k = 0; k < kWarpColumns; ++k) {
    A sum[] = {sums[k]};
    warp_reduce(sum, [](A x, A y) { return x + y; });
    if (lane == 0 && own + k < columns) g.sums[first + own + k] = sum[0];
  }
}

void gather_gradient(Tensor out, std::optional<Tensor> sums, Tensor tile, Tensor tokens,
                     Tensor start, Tensor count, std::optional<Tensor> lse,
                     std::optional<Tensor> factor, std::optional<Tensor> target,
                     std::optional<Tensor> hit, std::optional<Tensor> bias, double softcap,
                     double logit_scale) {
  const GatherTensors t{out, sums, tile, tokens, start, count, lse, factor, target, hit, bias};
  check_gathered(t);
  if (tile.size(1) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tile.get_device_index());
  for_gathered_dtypes(t, [&](auto number, auto narrower, auto arithmetic) {
    using T = decltype(number);
    using O = decltype(narrower);
    using A = decltype(arithmetic);
    const auto g = gathered_gradient<T, O, A>(t, softcap, logit_scale);
    const int64_t blocks = (tile.size(1) + kGatherColumns - 1) / kGatherColumns;
    launch(gather_gradient_kernel<T, O, A>, {static_cast<unsigned>(blocks), kGatherThreads},
           current_stream(tile), g);
  });
}

// Rows of `part` that are added to, or copied to, those of `out` at `row`. No row appears twice.
template <typename T, typename P>
struct PutRows {
  T* out;
  const P* part;
  const int64_t* row;
  int64_t count, width, stride, rows;
  bool add;
};

// A block processes a row of `part`.
template <typename A, typename T, typename P>
__global__ void __launch_bounds__(kGatherThreads)
    put_rows_kernel(const __grid_constant__ PutRows<T, P> a) {
  const int64_t row = a.row[blockIdx.x];
  if (row < 0 || row >= a.rows) return;
  const P* part = a.part + blockIdx.x * a.width;
  const auto sum = [&](int64_t column, auto& numbers) {
    constexpr int n = std::extent_v<std::remove_reference_t<decltype(numbers)>>;
    A more[n];
    load(part + column, more);
#pragma unroll
    for (int k = 0; k < n; ++k) numbers[k] = a.add ? numbers[k] + more[k] : more[k];
  };
  for_pieces<A, kReadWrite, 2, kForwards>(a.out + row * a.stride, a.width, sum);
}

void put_rows(Tensor out, Tensor rows, Tensor part, bool add) {
  check_put_rows(out, rows, part);
  if (part.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  for_dtypes("_put_rows: out", out, [&](auto number, auto arithmetic) {
    using T = decltype(number);
    using A = decltype(arithmetic);
    const auto put = [&](const auto* from) {
      using P = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
      const PutRows<T, P> a{static_cast<T*>(out.mutable_data_ptr()),
                            from,
                            static_cast<const int64_t*>(rows.const_data_ptr()),
                            part.size(0),
                            part.size(1),
                            out.stride(0),
                            out.size(0),
                            add};
      launch(put_rows_kernel<A, T, P>, {static_cast<unsigned>(a.count), kGatherThreads},
             current_stream(out), a);
    };
    if (part.scalar_type() == out.scalar_type())
      put(static_cast<const T*>(part.const_data_ptr()));
    else
      put(static_cast<const A*>(part.const_data_ptr()));
  });
}

}  // namespace storage_ops::kernels

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_tile_sums", TORCH_BOX(&storage_ops::kernels::tile_sums));
  m.impl("_gather_gradient", TORCH_BOX(&storage_ops::kernels::gather_gradient));
  m.impl("_put_rows", TORCH_BOX(&storage_ops::kernels::put_rows));
}
