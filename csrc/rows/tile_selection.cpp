// CPU kernels for choosing the classes of a gradient: sums of a tile's probabilities or numbers,
// gathers of some rows and columns or their gradient, and the scatter of products into rows of the
// weight's gradient.
#include <array>
#include <vector>

#include "row_load.h"
#include "tile_sums.h"

namespace storage_ops {
namespace {

constexpr int64_t kSums = 4;        // sums per bucket, so that additions do not wait for each other
constexpr int64_t kColumns = 4096;  // columns that a thread adds up at a time
constexpr int64_t kTokens = 256;    // tokens whose gradients are gathered at a time
template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);  // numbers in a cache line

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

// Adds up the columns of a row by bucket, in double, because tails are compared with small numbers.
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

// Computes column sums (columns,) without buckets, or sums of each row by bucket (rows, buckets).
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

// Adds or copies rows of `part` to the rows of `out` at `places`. No row appears twice.
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

// The facts about the tokens, in their order.
template <typename T, typename A>
struct TokenNumbers {
  std::vector<const T*> rows;
  std::vector<A> lse, factor;
};

// The gradients of the columns in a cache line, from `begin` on.
template <typename T, typename O, typename A>
STORAGE_OPS_INLINE void gather_columns(const GatheredGradient<T, O, A>& g,
                                       const TokenNumbers<T, A>& tokens, int64_t begin,
                                       int64_t end) {
  const auto& tile = g.numbers.tile;
  const auto transform = tile.transform;
  const bool logits = g.numbers.lse != nullptr;
  Block<A> block;
  A* z = block.values;
  std::array<A, kLine<T>> sums{};
  int64_t most = 0;
  for (int64_t c = begin; c < end; ++c) most = g.start[c] < 0 ? most : std::max(most, g.count[c]);
  for (int64_t first = 0; first < most; first += kTokens) {
    const T* const* row = tokens.rows.data() + first;
    const A* lse = logits ? tokens.lse.data() + first : nullptr;
    const A* factor = logits ? tokens.factor.data() + first : nullptr;
    for (int64_t c = begin; c < end; ++c) {
      const int64_t n = g.start[c] < 0 ? 0 : std::min(kTokens, g.count[c] - first);
      if (n <= 0) continue;
      // The first column loads the cache lines for the others, and prefetches the next ones.
      for (int64_t i = 0; i < n; ++i) {
        z[i] = static_cast<A>(row[i][c]);
        __builtin_prefetch(row[i] + end);
      }
      if (logits) {
        const A bias = tile.bias_of(c);
        if (transform.softcap != 0) {
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) z[i] = transform.logit(z[i] + bias);
        } else {
          for (int64_t i = 0; i < n; ++i) z[i] = (z[i] + bias) * transform.scale;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) z[i] = g.number(z[i], lse[i], factor[i]);
      }
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += z[i] < 0 ? -z[i] : z[i];
      sums[c - begin] += sum;
      narrow(z, g.out + g.start[c] + first, n);
    }
  }
  if (g.sums != nullptr) std::copy(sums.begin(), sums.begin() + (end - begin), g.sums + begin);
}

#define STORAGE_OPS_GATHERED_GRADIENT(T, O, A)                                               \
  STORAGE_OPS_MULTIVERSION void gather_line(const GatheredGradient<T, O, A>& g,              \
                                            const TokenNumbers<T, A>& tokens, int64_t begin, \
                                            int64_t end) {                                   \
    gather_columns<T, O, A>(g, tokens, begin, end);                                          \
  }
STORAGE_OPS_GATHERED_GRADIENT(double, double, double)
STORAGE_OPS_GATHERED_GRADIENT(float, float, float)
STORAGE_OPS_GATHERED_GRADIENT(float, BFloat16, float)
STORAGE_OPS_GATHERED_GRADIENT(float, Half, float)
STORAGE_OPS_GATHERED_GRADIENT(BFloat16, BFloat16, float)
STORAGE_OPS_GATHERED_GRADIENT(Half, Half, float)

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
  STORAGE_OPS_CHECK(std::all_of(each, each + places.size(0), fits), op, ": `", name,
                    "` must be from 0 to ", stop - 1, ".");
}

void gather_gradient(Tensor out, std::optional<Tensor> sums, Tensor tile, Tensor tokens,
                     Tensor start, Tensor count, std::optional<Tensor> lse,
                     std::optional<Tensor> factor, std::optional<Tensor> target,
                     std::optional<Tensor> hit, std::optional<Tensor> bias, double softcap,
                     double logit_scale) {
  const GatherTensors t{out, sums, tile, tokens, start, count, lse, factor, target, hit, bias};
  check_gathered(t);
  check_range("_gather_gradient", "tokens", tokens, tile.size(0));
  for_gathered_dtypes(t, [&](auto number, auto narrower, auto arithmetic) {
    using T = decltype(number);
    using O = decltype(narrower);
    using A = decltype(arithmetic);
    const auto g = gathered_gradient<T, O, A>(t, softcap, logit_scale);
    const int64_t columns = g.numbers.tile.columns;
    for (int64_t c = 0; c < columns; ++c) {
      STORAGE_OPS_CHECK(
          g.start[c] < 0 ||
              (0 <= g.count[c] && g.count[c] <= g.tokens && g.start[c] + g.count[c] <= out.numel()),
          "_gather_gradient: `start` ", g.start[c], " and `count` ", g.count[c], " of class ", c,
          " must be within ", out.numel(), " numbers and ", g.tokens, " tokens.");
    }
    TokenNumbers<T, A> each;
    for (int64_t i = 0; i < g.tokens; ++i) {
      const int64_t row = g.token[i];
      each.rows.push_back(g.numbers.tile.logits + row * g.numbers.tile.stride);
      if (g.numbers.lse == nullptr) continue;
      each.lse.push_back(g.numbers.lse[row]);
      each.factor.push_back(g.numbers.row_weight[row]);
    }
    const int64_t lines = (columns + kLine<T> - 1) / kLine<T>;
    torch::stable::parallel_for(0, lines, 1, [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const int64_t first = line * kLine<T>;
        gather_line(g, each, first, std::min(first + kLine<T>, columns));
      }
    });
    for (int64_t i = 0; g.target != nullptr && i < g.tokens; ++i) {
      const int64_t row = g.token[i], c = g.target[row];
      if (c < 0 || c >= columns || g.start[c] < 0 || i >= g.count[c]) continue;
      const A logit =
          g.numbers.tile.logit(g.numbers.tile.logits[row * g.numbers.tile.stride + c], c);
      const A value = g.target_number(logit, row);
      narrow(&value, g.out + g.start[c] + i, 1);
    }
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
  m.impl("_gather_gradient", TORCH_BOX(&storage_ops::gather_gradient));
  m.impl("_put_rows", TORCH_BOX(&storage_ops::put_rows));
}
