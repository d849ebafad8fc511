// What the choice of classes for a gradient needs of a tile on a CPU: sums of its probabilities or
// of its numbers, some of its rows and columns, or their gradient, and the way of products back to
// the rows of the weight's gradient.
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
                      "_tile_sums: bucket must be from 0 to ", s.buckets - 1);
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

// Adds or copies rows of `part` to the rows of `out` at `places`, each of which appears once.
template <typename T, typename P, typename A>
STORAGE_OPS_INLINE void put_blocks(T* out, const P* part, int64_t width, bool add) {
  Block<A> own, more;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t n = std::min(kBlock, width - begin);
    widen(part + begin, more.values, n);
    if (add) {
      widen(out + begin, own.values, n);
      for (int64_t j = 0; j < n; ++j) more.values[j] += own.values[j];
    }
    narrow(more.values, out + begin, n);
  }
}

// The gradient of a row, for its columns from `begin` on.
template <typename T, typename A>
STORAGE_OPS_INLINE void gather_block(const GatheredGradient<T, A>& g, int64_t i, int64_t begin,
                                     int64_t n) {
  const auto& tile = g.probabilities.tile;
  const int64_t row = g.row[i], target = g.target[row];
  const int64_t* column = g.column + begin;
  T* out = g.out + i * g.width + begin;
  if (g.ignores(row)) {
    std::fill(out, out + n, T(0));
    return;
  }
  Block<T> products;
  Block<A> z;
  const T* from = tile.logits + row * tile.stride;
  int64_t hit = -1;  // where the target is
  for (int64_t j = 0; j < n; ++j) products.values[j] = from[column[j]];
  for (int64_t j = 0; j < n; ++j) hit = column[j] == target ? j : hit;
  widen(products.values, z.values, n);
  if (tile.bias != nullptr)
    for (int64_t j = 0; j < n; ++j) z.values[j] += static_cast<A>(tile.bias[column[j]]);
  if (tile.wide_bias != nullptr)
    for (int64_t j = 0; j < n; ++j) z.values[j] += tile.wide_bias[column[j]];
  const auto transform = tile.transform;
  if (transform.softcap != 0) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) z.values[j] = transform.logit(z.values[j]);
  } else if (transform.scale != 1) {
    for (int64_t j = 0; j < n; ++j) z.values[j] *= transform.scale;
  }
  const A logit = hit < 0 ? A(0) : z.values[hit];
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) z.values[j] = g.number(z.values[j], row);
  if (hit >= 0) z.values[hit] = g.target_number(logit, row);
  narrow(z.values, out, n);
}

#define STORAGE_OPS_GATHERED_GRADIENT(T, A)                                              \
  STORAGE_OPS_MULTIVERSION void gather_row(const GatheredGradient<T, A>& g, int64_t i) { \
    for (int64_t begin = 0; begin < g.width; begin += kBlock)                            \
      gather_block<T, A>(g, i, begin, std::min(kBlock, g.width - begin));                \
  }
STORAGE_OPS_GATHERED_GRADIENT(double, double)
STORAGE_OPS_GATHERED_GRADIENT(float, float)
STORAGE_OPS_GATHERED_GRADIENT(BFloat16, float)
STORAGE_OPS_GATHERED_GRADIENT(Half, float)

#define STORAGE_OPS_PUT_ROWS(T, P, A)                                                     \
  STORAGE_OPS_MULTIVERSION void put_row(T* out, const P* part, int64_t width, bool add) { \
    put_blocks<T, P, A>(out, part, width, add);                                           \
  }
STORAGE_OPS_PUT_ROWS(double, double, double)
STORAGE_OPS_PUT_ROWS(float, float, float)
STORAGE_OPS_PUT_ROWS(BFloat16, float, float)
STORAGE_OPS_PUT_ROWS(BFloat16, BFloat16, float)
STORAGE_OPS_PUT_ROWS(Half, float, float)
STORAGE_OPS_PUT_ROWS(Half, Half, float)

void check_range(const char* op, const char* name, const Tensor& places, int64_t stop) {
  const auto* each = static_cast<const int64_t*>(places.const_data_ptr());
  const auto fits = [&](int64_t k) { return 0 <= k && k < stop; };
  STORAGE_OPS_CHECK(std::all_of(each, each + places.size(0), fits), op, ": ", name,
                    " must be from 0 to ", stop - 1);
}

// out[i, j] = tile[rows[i], columns[j]]
void gather_tile(Tensor out, Tensor tile, Tensor rows, Tensor columns) {
  check_gathered("_gather_tile", out, tile, rows, columns);
  check_range("_gather_tile", "rows", rows, tile.size(0));
  check_range("_gather_tile", "columns", columns, tile.size(1));
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

// out[i, j] = the gradient with respect to tile[rows[i], columns[j]]
void gather_gradient(Tensor out, Tensor tile, Tensor rows, Tensor columns, Tensor lse,
                     Tensor factor, Tensor target, Tensor hit, std::optional<Tensor> bias,
                     double softcap, double logit_scale) {
  check_gathered_gradient(out, tile, rows, columns, lse, factor, target, hit, bias);
  check_range("_gather_gradient", "rows", rows, tile.size(0));
  check_range("_gather_gradient", "columns", columns, tile.size(1));
  for_dtypes("_gather_gradient: tile", tile, [&](auto number, auto arithmetic) {
    const auto g = gathered_gradient<decltype(number), decltype(arithmetic)>(
        out, tile, rows, columns, lse, factor, target, hit, bias, softcap, logit_scale);
    torch::stable::parallel_for(0, g.height, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) gather_row(g, i);
    });
  });
}

// out[rows[i]] += part[i], or = part[i]
void put_rows(Tensor out, Tensor rows, Tensor part, bool add) {
  check_put_rows(out, rows, part);
  check_range("_put_rows", "rows", rows, out.size(0));
  for_dtypes("_put_rows: out", out, [&](auto number, auto arithmetic) {
    using T = decltype(number);
    using A = decltype(arithmetic);
    const auto* row = static_cast<const int64_t*>(rows.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    const int64_t width = out.size(1), stride = out.stride(0);
    const auto put = [&](const auto* from) {
      torch::stable::parallel_for(0, part.size(0), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          put_row(to + row[i] * stride, from + i * width, width, add);
      });
    };
    if (part.scalar_type() == out.scalar_type())
      put(static_cast<const T*>(part.const_data_ptr()));
    else
      put(static_cast<const A*>(part.const_data_ptr()));
  });
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_tile_sums", TORCH_BOX(&storage_ops::tile_sums));
  m.impl("_gather_tile", TORCH_BOX(&storage_ops::gather_tile));
  m.impl("_gather_gradient", TORCH_BOX(&storage_ops::gather_gradient));
  m.impl("_put_rows", TORCH_BOX(&storage_ops::put_rows));
}
