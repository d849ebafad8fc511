// What the choice of classes for a gradient needs of a tile on a CPU: sums of its probabilities or
// of its numbers, and some of its rows and columns.
#include <array>
#include <vector>

#include "row_load.h"

namespace storage_ops {
namespace {

constexpr int64_t kBuckets = 64;    // at most
constexpr int64_t kSums = 4;        // of a bucket, so that additions do not wait for each other
constexpr int64_t kColumns = 4096;  // that a thread adds up at a time

// What is added up: numbers of a tile, or the probabilities of its logits.
template <typename T, typename A>
struct Summed {
  RowArguments<T, A> tile;
  const A* lse;  // of each row; +inf: none of its classes counts; nullptr: numbers as they are
  const uint8_t* bucket;  // of each column
  A* out;

  STORAGE_OPS_INLINE void load_block(int64_t row, int64_t begin, int64_t n, A* values) const {
    load(tile, row, begin, n, values);
    if (lse == nullptr) return;
    const A shift = lse[row];
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) values[j] = exponential(values[j] - shift);
  }
};

// Adds the rows up, for columns from `begin` on.
template <typename T, typename A>
STORAGE_OPS_INLINE void add_columns(const Summed<T, A>& s, int64_t begin, int64_t end) {
  Block<A> values, total;
  for (; begin < end; begin += kBlock) {
    const int64_t n = std::min(kBlock, end - begin);
    std::fill(total.values, total.values + n, A(0));
    for (int64_t i = 0; i < s.tile.rows; ++i) {
      s.load_block(i, begin, n, values.values);
      for (int64_t j = 0; j < n; ++j) total.values[j] += values.values[j];
    }
    std::copy(total.values, total.values + n, s.out + begin);
  }
}

// Adds up the columns of a row by bucket, in double, since tails are compared with small numbers.
template <typename T, typename A>
STORAGE_OPS_INLINE void add_buckets(const Summed<T, A>& s, int64_t row, int64_t buckets) {
  Block<A> block;
  const A* values = block.values;
  std::array<std::array<double, kBuckets>, kSums> sums{};
  for (int64_t begin = 0; begin < s.tile.columns; begin += kBlock) {
    const int64_t n = std::min(kBlock, s.tile.columns - begin);
    s.load_block(row, begin, n, block.values);
    const uint8_t* bucket = s.bucket + begin;
    int64_t j = 0;
    for (; j + kSums <= n; j += kSums)
      for (int64_t k = 0; k < kSums; ++k) sums[k][bucket[j + k]] += values[j + k];
    for (; j < n; ++j) sums[0][bucket[j]] += values[j];
  }
  for (int64_t b = 0; b < buckets; ++b) {
    const double total = sums[0][b] + sums[1][b] + sums[2][b] + sums[3][b];
    s.out[row * buckets + b] = static_cast<A>(total);
  }
}

// Multiversioned entry points, as in linear_cross_entropy.cpp.
#define STORAGE_OPS_TILE_SUMS(T, A)                                                              \
  STORAGE_OPS_MULTIVERSION void sum_columns(const Summed<T, A>& s, int64_t begin, int64_t end) { \
    add_columns<T, A>(s, begin, end);                                                            \
  }                                                                                              \
  STORAGE_OPS_MULTIVERSION void sum_buckets(const Summed<T, A>& s, int64_t row, int64_t count) { \
    add_buckets<T, A>(s, row, count);                                                            \
  }
STORAGE_OPS_TILE_SUMS(double, double)
STORAGE_OPS_TILE_SUMS(float, float)
STORAGE_OPS_TILE_SUMS(BFloat16, float)
STORAGE_OPS_TILE_SUMS(Half, float)

void check_vector(const char* name, const std::optional<Tensor>& t, int64_t size,
                  ScalarType dtype) {
  STORAGE_OPS_CHECK(!t || (t->dim() == 1 && t->size(0) == size && t->scalar_type() == dtype &&
                           t->is_contiguous()),
                    "_tile_sums: ", name, " must be contiguous, of ", size, " elements");
}

// Column sums (columns,) without buckets, else sums of each row by bucket (rows, buckets).
void tile_sums(Tensor out, Tensor tile, std::optional<Tensor> lse, std::optional<Tensor> bias,
               std::optional<Tensor> bucket, double softcap, double logit_scale) {
  STORAGE_OPS_CHECK(tile.dim() == 2 && (tile.stride(1) == 1 || tile.size(1) < 2),
                    "_tile_sums: tile must be a matrix with contiguous rows");
  const int64_t rows = tile.size(0), columns = tile.size(1);
  const ScalarType wide = arithmetic_of(tile);
  check_vector("lse", lse, rows, wide);
  check_vector("bucket", bucket, columns, ScalarType::Byte);
  check_vector("bias", bias, columns, bias ? bias->scalar_type() : wide);
  STORAGE_OPS_CHECK(
      !bias || bias->scalar_type() == wide || bias->scalar_type() == tile.scalar_type(),
      "_tile_sums: bias must have the dtype of the tile or of the arithmetic");
  const bool fits = bucket ? out.dim() == 2 && out.size(0) == rows && out.size(1) <= kBuckets
                           : out.dim() == 1 && out.size(0) == columns;
  STORAGE_OPS_CHECK(fits && out.is_contiguous() && out.scalar_type() == wide,
                    "_tile_sums: out must be (columns,), or (rows, up to ", kBuckets,
                    ") with buckets, in the dtype of the arithmetic");
  const int64_t buckets = bucket ? out.size(1) : 0;
  const uint8_t* each = pointer<uint8_t>(bucket);
  STORAGE_OPS_CHECK(
      each == nullptr || std::all_of(each, each + columns, [&](uint8_t b) { return b < buckets; }),
      "_tile_sums: bucket must be from 0 to ", buckets - 1);
  for_dtypes("_tile_sums: tile", tile, [&](auto number, auto arithmetic) {
    using T = decltype(number);
    using A = decltype(arithmetic);
    RowArguments<T, A> a{};
    a.logits = static_cast<T*>(const_cast<void*>(tile.const_data_ptr()));
    const bool is_wide = bias && bias->scalar_type() != tile.scalar_type();
    a.bias = is_wide ? nullptr : pointer<T>(bias);
    a.wide_bias = is_wide ? pointer<A>(bias) : nullptr;
    a.rows = rows, a.columns = columns, a.stride = tile.stride(0);
    a.transform = {static_cast<A>(logit_scale), static_cast<A>(softcap),
                   static_cast<A>(softcap == 0 ? 0 : 1 / softcap)};
    const Summed<T, A> s{a, pointer<A>(lse), each, static_cast<A*>(out.mutable_data_ptr())};
    if (each == nullptr) {
      const int64_t parts = (columns + kColumns - 1) / kColumns;
      torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
        sum_columns(s, begin * kColumns, std::min(end * kColumns, columns));
      });
    } else {
      torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) sum_buckets(s, i, buckets);
      });
    }
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

void check_places(const char* name, const Tensor& places, int64_t size, int64_t stop) {
  STORAGE_OPS_CHECK(places.dim() == 1 && places.scalar_type() == ScalarType::Long &&
                        places.is_contiguous() && places.size(0) == size,
                    "_gather_tile: ", name, " must be contiguous int64, one for each of out's");
  const auto* each = static_cast<const int64_t*>(places.const_data_ptr());
  STORAGE_OPS_CHECK(std::all_of(each, each + size, [&](int64_t k) { return 0 <= k && k < stop; }),
                    "_gather_tile: ", name, " must be from 0 to ", stop - 1);
}

// out[i, j] = tile[rows[i], columns[j]]
void gather_tile(Tensor out, Tensor tile, Tensor rows, Tensor columns) {
  STORAGE_OPS_CHECK(tile.dim() == 2 && (tile.stride(1) == 1 || tile.size(1) < 2),
                    "_gather_tile: tile must be a matrix with contiguous rows");
  STORAGE_OPS_CHECK(
      out.dim() == 2 && out.is_contiguous() && out.scalar_type() == tile.scalar_type(),
      "_gather_tile: out must be a contiguous matrix in the dtype of the tile");
  check_places("rows", rows, out.size(0), tile.size(0));
  check_places("columns", columns, out.size(1), tile.size(1));
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
