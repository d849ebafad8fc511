// What the choice of classes for a gradient needs of a tile on a GPU: sums of its probabilities or
// of its numbers, and some of its rows and columns. Always added up in the same order, so that two
// runs give the same bits.
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

// From n products of a row to what is added up.
template <int n, typename T, typename A>
__device__ __forceinline__ void summands(const Summed<T, A>& s, int64_t row, int64_t column,
                                         A (&z)[n]) {
  A bias[n] = {};
  if (s.tile.bias != nullptr) load(s.tile.bias + column, bias);
  if (s.tile.wide_bias != nullptr) load(s.tile.wide_bias + column, bias);
#pragma unroll
  for (int k = 0; k < n; ++k) z[k] = s.number(s.tile.transform.logit(z[k] + bias[k]), row);
}

// A block adds up the columns of a row by bucket: every thread has a sum of its own for each.
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

// A block adds up a pack of columns for each lane; its warps take rows in turn.
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
      launch(bucket_sums_kernel<T, A>, rows, kSumThreads<A>, stream, s);
    } else {
      constexpr int64_t kColumns = 32 * kPack<T>;
      const auto blocks = static_cast<unsigned>((s.tile.columns + kColumns - 1) / kColumns);
      launch(column_sums_kernel<T, A>, blocks, kSumThreads<A>, stream, s);
    }
  });
}

// What is gathered, as numbers of as many bytes.
struct Gathered {
  int64_t stride, height, width, rows, columns;
  const int64_t *row, *column;
};

template <typename T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(T* out, const T* tile, const Gathered g) {
  const int64_t row = g.row[blockIdx.x];
  for (int64_t j = threadIdx.x; j < g.width; j += blockDim.x) {
    const int64_t column = g.column[j];
    const bool inside = row >= 0 && row < g.rows && column >= 0 && column < g.columns;
    if (inside) out[blockIdx.x * g.width + j] = tile[row * g.stride + column];
  }
}

void gather_tile(Tensor out, Tensor tile, Tensor rows, Tensor columns) {
  check_gathered(out, tile, rows, columns);
  if (out.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tile.get_device_index());
  const Gathered g{tile.stride(0),
                   out.size(0),
                   out.size(1),
                   tile.size(0),
                   tile.size(1),
                   static_cast<const int64_t*>(rows.const_data_ptr()),
                   static_cast<const int64_t*>(columns.const_data_ptr())};
  for_dtypes("_gather_tile: tile", tile, [&](auto number, auto) {
    using T = decltype(number);
    launch(gather_kernel<T>, static_cast<unsigned>(g.height), kGatherThreads, current_stream(tile),
           static_cast<T*>(out.mutable_data_ptr()), static_cast<const T*>(tile.const_data_ptr()),
           g);
  });
}

}  // namespace storage_ops::kernels

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_tile_sums", TORCH_BOX(&storage_ops::kernels::tile_sums));
  m.impl("_gather_tile", TORCH_BOX(&storage_ops::kernels::gather_tile));
}
