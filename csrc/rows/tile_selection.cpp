// What the choice of classes for a gradient needs of a tile on a CPU: sums of its probabilities or
// of its numbers, and some of its rows and columns.
#include <array>

#include "row_load.h"
#include "tile_sums.h"

namespace storage_ops {
namespace {

constexpr int64_t kSums = 4;        // of a bucket, so that additions do not wait for each other
constexpr int64_t kColumns = 4096;  // that a thread adds up at a time

template <typename T, typename A>
STORAGE_OPS_INLINE void load_block(const Summed<T, A>& s, int64_t row, int64_t begin, int64_t n,
                                   A* values) {
  load(s.tile, row, begin, n, values);
  if (s.lse == nullptr && s.row_weight == nullptr && !s.absolute) return;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) values[j] = s.number(values[j], row);
}

// Adds the rows up, for columns from `begin` on.
template <typename T, typename A>
STORAGE_OPS_INLINE void add_columns(const Summed<T, A>& s, int64_t begin, int64_t end) {
  Block<A> values, total;
  for (; begin < end; begin += kBlock) {
    const int64_t n = std::min(kBlock, end - begin);
    std::fill(total.values, total.values + n, A(0));
    for (int64_t i = 0; i < s.tile.rows; ++i) {
      load_block(s, i, begin, n, values.values);
      for (int64_t j = 0; j < n; ++j) total.values[j] += values.values[j];
    }
    std::copy(total.values, total.values + n, s.out + begin);
  }
}

// Adds up the columns of a row by bucket, in double, since tails are compared with small numbers.
template <typename T, typename A>
STORAGE_OPS_INLINE void add_buckets(const Summed<T, A>& s, int64_t row) {
  Block<A> block;
  const A* values = block.values;
  std::array<std::array<double, kBuckets>, kSums> sums{};
  for (int64_t begin = 0; begin < s.tile.columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, s.tile.columns - begin);
    load_block(s, row, begin, n, block.values);
    const uint8_t* bucket = s.bucket + begin;
    int64_t j = 0;
    for (; j + kSums <= n; j += kSums)
      for (int64_t k = 0; k < kSums; ++k) sums[k][bucket[j + k]] += values[j + k];
    for (; j < n; ++j) sums[0][bucket[j]] += values[j];
  }
  for (int64_t b = 0; b < s.buckets; ++b) {
    const double total = sums[0][b] + sums[1][b] + sums[2][b] + sums[3][b];
    s.out[row * s.buckets + b] = static_cast<A>(total);
  }
}

// Multiversioned entry points, as in linear_cross_entropy.cpp.
#define STORAGE_OPS_TILE_SUMS(T, A)                                                              \
  STORAGE_OPS_MULTIVERSION void sum_columns(const Summed<T, A>& s, int64_t begin, int64_t end) { \
    add_columns<T, A>(s, begin, end);                                                            \
  }                                                                                              \
  STORAGE_OPS_MULTIVERSION void sum_buckets(const Summed<T, A>& s, int64_t row) {                \
    add_buckets<T, A>(s, row);                                                                   \
  }
STORAGE_OPS_TILE_SUMS(double, double)
STORAGE_OPS_TILE_SUMS(float, float)
STORAGE_OPS_TILE_SUMS(BFloat16, float)
STORAGE_OPS_TILE_SUMS(Half, float)

// Column sums (columns,) without buckets, else sums of each row by bucket (rows, buckets).
void tile_sums(Tensor out, Tensor tile, std::optional<Tensor> lse, std::optional<Tensor> row_weight,
               std::optional<Tensor> bias, std::optional<Tensor> bucket, double softcap,
               double logit_scale, bool absolute, bool slope) {
  check_sums(out, tile, lse, row_weight, bias, bucket);
  for_dtypes("_tile_sums: tile", tile, [&](auto number, auto arithmetic) {
    const auto s = summed<decltype(number), decltype(arithmetic)>(
        out, tile, lse, row_weight, bias, bucket, softcap, logit_scale, absolute, slope);
    const int64_t columns = s.tile.columns, rows = s.tile.rows;
    if (s.bucket == nullptr) {
      const int64_t parts = (columns + kColumns - 1) / kColumns;
      torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
        sum_columns(s, begin * kColumns, std::min(end * kColumns, columns));
      });
      return;
    }
    const auto fits = [&](uint8_t b) { return b < s.buckets; };
    STORAGE_OPS_CHECK(std::all_of(s.bucket, s.bucket + columns, fits),
                      "_tile_sums: `bucket` must be from 0 to ", s.buckets - 1, ".");
    torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sum_buckets(s, i);
    });
  });
}

template <typename T>
void gather_rows(T* out, const T* tile, int64_t stride, const int64_t* rows, const int64_t* columns,
                 int64_t width, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* from = tile + rows[i] * stride;
    T* to = out + i * width;
    for (int64_t j = 0; j < width; ++j) to[j] = from[columns[j]];
  }
}

void check_places(const char* name, const Tensor& places, int64_t stop) {
  const auto* each = static_cast<const int64_t*>(places.const_data_ptr());
  const auto fits = [&](int64_t k) { return 0 <= k && k < stop; };
  STORAGE_OPS_CHECK(std::all_of(each, each + places.size(0), fits), "_gather_tile: `", name,
                    "` must be from 0 to ", stop - 1, ".");
}

// out[i, j] = tile[rows[i], columns[j]]
void gather_tile(Tensor out, Tensor tile, Tensor rows, Tensor columns) {
  check_gathered(out, tile, rows, columns);
  check_places("rows", rows, tile.size(0));
  check_places("columns", columns, tile.size(1));
  for_dtypes("_gather_tile: tile", tile, [&](auto number, auto) {
    using T = decltype(number);
    const auto* from = static_cast<const T*>(tile.const_data_ptr());
    const auto* row = static_cast<const int64_t*>(rows.const_data_ptr());
    const auto* column = static_cast<const int64_t*>(columns.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    torch::stable::parallel_for(0, out.size(0), 1, [&](int64_t begin, int64_t end) {
      gather_rows(to, from, tile.stride(0), row, column, out.size(1), begin, end);
    });
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_tile_sums", TORCH_BOX(&storage_ops::tile_sums));
  m.impl("_gather_tile", TORCH_BOX(&storage_ops::gather_tile));
}
