// The arguments of _tile_sums, and of the ops that gather from a tile or add to some rows of a
// matrix, on a CPU and on a GPU, and their checks.
#pragma once

#include "cross_entropy_rows.h"

namespace storage_ops {

constexpr int64_t kBuckets = 32;  // at most

// What is added up: numbers of a tile, or the probabilities of its logits.
template <typename T, typename A>
struct Summed {
  RowArguments<T, A> tile;  // of which it has the logits, the bias and their transform
  const A* lse;  // of each row; +inf: none of its classes counts; nullptr: numbers as they are
  const A* row_weight;    // each row is multiplied by it; nullptr: none is
  const uint8_t* bucket;  // of each column; nullptr: columns are added up
  A* out;                 // (columns,), or (rows, buckets)
  int64_t buckets;
  bool absolute;  // without lse, their absolute values are added up
  bool slope;     // probabilities are multiplied by the slope of the soft-cap

  STORAGE_OPS_INLINE A number(A value, int64_t row) const {
    const A plain = absolute && value < 0 ? -value : value;
    A z = lse == nullptr ? plain : exponential(value - lse[row]);
    if (slope) {
      const A capped = value * tile.transform.inverse_softcap;
      z *= 1 - capped * capped;
    }
    return row_weight == nullptr ? z : z * row_weight[row];
  }
};

inline void check_each(const char* op, const char* name, const std::optional<Tensor>& t,
                       int64_t size, ScalarType dtype) {
  STORAGE_OPS_CHECK(!t || (t->dim() == 1 && t->size(0) == size && t->scalar_type() == dtype &&
                           t->is_contiguous()),
                    op, ": ", name, " must be contiguous, of ", size, " elements");
}

inline void check_tile(const char* op, const Tensor& tile) {
  STORAGE_OPS_CHECK(tile.dim() == 2 && (tile.stride(1) == 1 || tile.size(1) < 2), op,
                    ": tile must be a matrix with contiguous rows");
}

inline void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& tile) {
  const ScalarType wide = arithmetic_of(tile);
  check_each(op, "bias", bias, tile.size(1), bias ? bias->scalar_type() : wide);
  STORAGE_OPS_CHECK(
      !bias || bias->scalar_type() == wide || bias->scalar_type() == tile.scalar_type(), op,
      ": bias must have the dtype of the tile or of the arithmetic");
}

inline void check_sums(const Tensor& out, const Tensor& tile, const std::optional<Tensor>& lse,
                       const std::optional<Tensor>& row_weight, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& bucket) {
  constexpr const char* kOp = "_tile_sums";
  check_tile(kOp, tile);
  const int64_t rows = tile.size(0), columns = tile.size(1);
  const ScalarType wide = arithmetic_of(tile);
  check_each(kOp, "lse", lse, rows, wide);
  check_each(kOp, "row_weight", row_weight, rows, wide);
  check_each(kOp, "bucket", bucket, columns, ScalarType::Byte);
  check_bias(kOp, bias, tile);
  const bool fits = bucket ? out.dim() == 2 && out.size(0) == rows && out.size(1) <= kBuckets
                           : out.dim() == 1 && out.size(0) == columns;
  STORAGE_OPS_CHECK(fits && out.is_contiguous() && out.scalar_type() == wide, kOp,
                    ": out must be (columns,), or (rows, up to ", kBuckets,
                    ") with buckets, contiguous and in the dtype of the arithmetic");
}

template <typename T, typename A>
Summed<T, A> summed(const Tensor& out, const Tensor& tile, const std::optional<Tensor>& lse,
                    const std::optional<Tensor>& row_weight, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& bucket, double softcap, double logit_scale,
                    bool absolute, bool slope) {
  Summed<T, A> s{};
  s.tile.logits = static_cast<T*>(const_cast<void*>(tile.const_data_ptr()));
  const bool wide = bias && bias->scalar_type() != tile.scalar_type();
  s.tile.bias = wide ? nullptr : pointer<T>(bias);
  s.tile.wide_bias = wide ? pointer<A>(bias) : nullptr;
  s.tile.rows = tile.size(0);
  s.tile.columns = tile.size(1);
  s.tile.stride = tile.stride(0);
  s.tile.transform = {static_cast<A>(logit_scale), static_cast<A>(softcap),
                      static_cast<A>(softcap == 0 ? 0 : 1 / softcap)};
  s.lse = pointer<A>(lse);
  s.row_weight = pointer<A>(row_weight);
  s.bucket = pointer<uint8_t>(bucket);
  s.out = static_cast<A*>(out.mutable_data_ptr());
  s.buckets = bucket ? out.size(1) : 0;
  s.absolute = absolute;
  s.slope = slope && softcap != 0;
  return s;
}

inline void check_places(const char* op, const char* name, const Tensor& places, int64_t count) {
  STORAGE_OPS_CHECK(places.dim() == 1 && places.scalar_type() == ScalarType::Long &&
                        places.is_contiguous() && places.size(0) == count,
                    op, ": ", name, " must be contiguous int64, of ", count, " elements");
}

inline void check_gathered(const char* op, const Tensor& out, const Tensor& tile,
                           const Tensor& rows, const Tensor& columns) {
  check_tile(op, tile);
  STORAGE_OPS_CHECK(
      out.dim() == 2 && out.is_contiguous() && out.scalar_type() == tile.scalar_type(), op,
      ": out must be a contiguous matrix in the dtype of the tile");
  check_places(op, "rows", rows, out.size(0));
  check_places(op, "columns", columns, out.size(1));
}

// The gradient of cross-entropy with respect to products, for some rows and columns of a tile.
template <typename T, typename A>
struct GatheredGradient {
  Summed<T, A> probabilities;  // times the factor of their row, and the slope of the soft-cap
  const int64_t *row, *column;
  const int64_t* target;  // the column of each row's target, or a number that no column has
  const A* hit;           // what is subtracted there, times the slope
  T* out;                 // (height, width)
  int64_t height, width;

  // A token that is ignored has no gradient, whatever its logits are.
  STORAGE_OPS_INLINE bool ignores(int64_t i) const {
    return probabilities.lse[i] == std::numeric_limits<A>::infinity();
  }

  // Of a class that is not the target.
  STORAGE_OPS_INLINE A number(A logit, int64_t i) const { return probabilities.number(logit, i); }

  STORAGE_OPS_INLINE A target_number(A logit, int64_t i) const {
    const A capped = logit * probabilities.tile.transform.inverse_softcap;
    return number(logit, i) - hit[i] * (1 - capped * capped);
  }
};

template <typename T, typename A>
GatheredGradient<T, A> gathered_gradient(const Tensor& out, const Tensor& tile, const Tensor& rows,
                                         const Tensor& columns, const Tensor& lse,
                                         const Tensor& factor, const Tensor& target,
                                         const Tensor& hit, const std::optional<Tensor>& bias,
                                         double softcap, double logit_scale) {
  GatheredGradient<T, A> g{};
  g.probabilities =
      summed<T, A>(hit, tile, lse, factor, bias, std::nullopt, softcap, logit_scale, false, true);
  g.row = static_cast<const int64_t*>(rows.const_data_ptr());
  g.column = static_cast<const int64_t*>(columns.const_data_ptr());
  g.target = static_cast<const int64_t*>(target.const_data_ptr());
  g.hit = static_cast<const A*>(hit.const_data_ptr());
  g.out = static_cast<T*>(out.mutable_data_ptr());
  g.height = out.size(0);
  g.width = out.size(1);
  return g;
}

inline void check_gathered_gradient(const Tensor& out, const Tensor& tile, const Tensor& rows,
                                    const Tensor& columns, const Tensor& lse, const Tensor& factor,
                                    const Tensor& target, const Tensor& hit,
                                    const std::optional<Tensor>& bias) {
  constexpr const char* kOp = "_gather_gradient";
  check_gathered(kOp, out, tile, rows, columns);
  const int64_t height = tile.size(0);
  const ScalarType wide = arithmetic_of(tile);
  check_places(kOp, "target", target, height);
  check_each(kOp, "lse", lse, height, wide);
  check_each(kOp, "factor", factor, height, wide);
  check_each(kOp, "hit", hit, height, wide);
  check_bias(kOp, bias, tile);
}

inline void check_put_rows(const Tensor& out, const Tensor& rows, const Tensor& part) {
  constexpr const char* kOp = "_put_rows";
  STORAGE_OPS_CHECK(out.dim() == 2 && (out.stride(1) == 1 || out.size(1) < 2), kOp,
                    ": out must be a matrix with contiguous rows");
  STORAGE_OPS_CHECK(
      part.dim() == 2 && part.is_contiguous() && part.size(1) == out.size(1) &&
          (part.scalar_type() == out.scalar_type() || part.scalar_type() == arithmetic_of(out)),
      kOp, ": part must be contiguous, as wide as out, in its dtype or that of the arithmetic");
  check_places(kOp, "rows", rows, part.size(0));
}

}  // namespace storage_ops
