// The arguments of _tile_sums and _gather_tile on a CPU and on a GPU, and their checks.
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

inline void check_each(const char* name, const std::optional<Tensor>& t, int64_t size,
                       ScalarType dtype) {
  STORAGE_OPS_CHECK(!t || (t->dim() == 1 && t->size(0) == size && t->scalar_type() == dtype &&
                           t->is_contiguous()),
                    "_tile_sums: `", name, "` must be contiguous, of ", size, " elements.");
}

inline void check_tile(const char* op, const Tensor& tile) {
  STORAGE_OPS_CHECK(tile.dim() == 2 && (tile.stride(1) == 1 || tile.size(1) < 2), op,
                    ": `tile` must be a matrix with contiguous rows.");
}

inline void check_sums(const Tensor& out, const Tensor& tile, const std::optional<Tensor>& lse,
                       const std::optional<Tensor>& row_weight, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& bucket) {
  check_tile("_tile_sums", tile);
  const int64_t rows = tile.size(0), columns = tile.size(1);
  const ScalarType wide = arithmetic_of(tile);
  check_each("lse", lse, rows, wide);
  check_each("row_weight", row_weight, rows, wide);
  check_each("bucket", bucket, columns, ScalarType::Byte);
  check_each("bias", bias, columns, bias ? bias->scalar_type() : wide);
  STORAGE_OPS_CHECK(
      !bias || bias->scalar_type() == wide || bias->scalar_type() == tile.scalar_type(),
      "_tile_sums: `bias` must have the dtype of the tile or of the arithmetic.");
  const bool fits = bucket ? out.dim() == 2 && out.size(0) == rows && out.size(1) <= kBuckets
                           : out.dim() == 1 && out.size(0) == columns;
  STORAGE_OPS_CHECK(fits && out.is_contiguous() && out.scalar_type() == wide,
                    "_tile_sums: `out` must be (columns,), or (rows, up to ", kBuckets,
                    ") with buckets, contiguous and in the dtype of the arithmetic.");
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

inline void check_gathered(const Tensor& out, const Tensor& tile, const Tensor& rows,
                           const Tensor& columns) {
  constexpr const char* kOp = "_gather_tile";
  check_tile(kOp, tile);
  STORAGE_OPS_CHECK(
      out.dim() == 2 && out.is_contiguous() && out.scalar_type() == tile.scalar_type(), kOp,
      ": `out` must be a contiguous matrix in the dtype of the tile.");
  for (int dim = 0; dim < 2; ++dim) {
    const Tensor& places = dim == 0 ? rows : columns;
    STORAGE_OPS_CHECK(places.dim() == 1 && places.scalar_type() == ScalarType::Long &&
                          places.is_contiguous() && places.size(0) == out.size(dim),
                      kOp,
                      ": `rows` and `columns` must be contiguous int64, of the sizes of `out`.");
  }
}

}  // namespace storage_ops
