// The arguments of _tile_sums, _gather_gradient and _put_rows on CPU and GPU, and their checks.
#pragma once

#include "cross_entropy_rows.h"

namespace storage_ops {

constexpr int64_t kBuckets = 32;  // the most buckets

// The summands: numbers of a tile, or the probabilities of its logits.
template <typename T, typename A>
struct Summed {
  RowArguments<T, A> tile;  // has the logits, the bias and their transform
  // log-sum-exp of each row, +inf for rows without classes that count; nullptr: plain numbers.
  const A* lse;
  const A* row_weight;    // the factor of each row; nullptr: none
  const uint8_t* bucket;  // the bucket of each column; nullptr: sum columns
  A* out;                 // (columns,), or (rows, buckets)
  int64_t buckets;
  bool absolute;  // without lse, add up absolute values
  bool slope;     // multiply probabilities by the slope of the soft-cap

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
                    op, ": `", name, "` must be contiguous, of ", size, " elements.");
}

inline void check_tile(const char* op, const Tensor& tile) {
  STORAGE_OPS_CHECK(tile.dim() == 2 && (tile.stride(1) == 1 || tile.size(1) < 2), op,
                    ": `tile` must be a matrix with contiguous rows.");
}

inline void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& tile) {
  const ScalarType wide = arithmetic_of(tile);
  check_each(op, "bias", bias, tile.size(1), bias ? bias->scalar_type() : wide);
  STORAGE_OPS_CHECK(
      !bias || bias->scalar_type() == wide || bias->scalar_type() == tile.scalar_type(), op,
      ": `bias` must have the dtype of the tile or of the arithmetic.");
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
                    ": `out` must be (columns,), or (rows, up to ", kBuckets,
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

inline void check_places(const char* op, const char* name, const Tensor& places, int64_t count) {
  STORAGE_OPS_CHECK(places.dim() == 1 && places.scalar_type() == ScalarType::Long &&
                        places.is_contiguous() && places.size(0) == count,
                    op, ": `", name, "` must be contiguous int64, of ", count, " elements.");
}

// Gradients with respect to numbers of a tile, by class. out[start[c] + i] is the gradient of class
// c and token[i], for i < count[c]. A class with a negative start has none.
template <typename T, typename O, typename A>
struct GatheredGradient {
  // Without lse, the tile already has gradients. Its row_weight is the factor from a probability to
  // the gradient.
  Summed<T, A> numbers;
  const int64_t *token, *start, *count;
  const int64_t* target;  // the class of each row's target, or a number that no class has
  const A* hit;           // the number that is subtracted at the target, times the slope
  O* out;
  A* sums;  // (columns,) sums of absolute gradients without targets' parts, or nullptr
  int64_t tokens;

  // The slope of the soft-cap. Without a soft-cap it is 1, also for an infinite logit.
  STORAGE_OPS_INLINE A slope(A logit) const {
    const auto& transform = numbers.tile.transform;
    const A capped = transform.softcap == 0 ? A(0) : logit * transform.inverse_softcap;
    return 1 - capped * capped;
  }

  // The gradient of a class that is no target. It is 0 for an ignored token, whatever its logits
  // are.
  STORAGE_OPS_INLINE A number(A logit, A lse, A factor) const {
    const A p = exponential(logit - lse) * factor * slope(logit);
    return lse == std::numeric_limits<A>::infinity() ? A(0) : p;
  }

  STORAGE_OPS_INLINE A target_number(A logit, int64_t row) const {
    const A lse = numbers.lse[row];
    const bool ignored = lse == std::numeric_limits<A>::infinity();
    const A part = ignored ? A(0) : hit[row] * slope(logit);
    return number(logit, lse, numbers.row_weight[row]) - part;
  }
};

// The tensor arguments of _gather_gradient.
struct GatherTensors {
  Tensor out;
  std::optional<Tensor> sums;
  Tensor tile, tokens, start, count;
  std::optional<Tensor> lse, factor, target, hit, bias;
};

inline void check_gathered(const GatherTensors& t) {
  constexpr const char* kOp = "_gather_gradient";
  check_tile(kOp, t.tile);
  const int64_t rows = t.tile.size(0), columns = t.tile.size(1);
  const ScalarType wide = arithmetic_of(t.tile), dtype = t.out.scalar_type();
  const bool narrower = t.tile.scalar_type() == ScalarType::Float &&
                        (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
  STORAGE_OPS_CHECK(
      t.out.dim() == 1 && t.out.is_contiguous() && (dtype == t.tile.scalar_type() || narrower), kOp,
      ": `out` must be contiguous, in the dtype of the tile or in 16 bits.");
  check_places(kOp, "tokens", t.tokens, t.tokens.dim() == 1 ? t.tokens.size(0) : -1);
  check_places(kOp, "start", t.start, columns);
  check_places(kOp, "count", t.count, columns);
  check_each(kOp, "sums", t.sums, columns, wide);
  const bool logits = t.lse.has_value();
  STORAGE_OPS_CHECK(logits == t.factor.has_value() && logits == t.target.has_value() &&
                        logits == t.hit.has_value(),
                    kOp, ": `lse`, `factor`, `target` and `hit` must be given together.");
  check_each(kOp, "lse", t.lse, rows, wide);
  check_each(kOp, "factor", t.factor, rows, wide);
  check_each(kOp, "hit", t.hit, rows, wide);
  if (t.target) check_places(kOp, "target", *t.target, rows);
  check_bias(kOp, t.bias, t.tile);
}

template <typename T, typename O, typename A>
GatheredGradient<T, O, A> gathered_gradient(const GatherTensors& t, double softcap,
                                            double logit_scale) {
  GatheredGradient<T, O, A> g{};
  g.numbers = summed<T, A>(t.out, t.tile, t.lse, t.factor, t.bias, std::nullopt, softcap,
                           logit_scale, false, false);
  g.token = static_cast<const int64_t*>(t.tokens.const_data_ptr());
  g.start = static_cast<const int64_t*>(t.start.const_data_ptr());
  g.count = static_cast<const int64_t*>(t.count.const_data_ptr());
  g.target = pointer<int64_t>(t.target);
  g.hit = pointer<A>(t.hit);
  g.out = static_cast<O*>(t.out.mutable_data_ptr());
  g.sums = t.sums ? static_cast<A*>(t.sums->mutable_data_ptr()) : nullptr;
  g.tokens = t.tokens.size(0);
  return g;
}

// Calls `body` with numbers of the types of the tile, of `out` and of the arithmetic.
template <typename Body>
void for_gathered_dtypes(const GatherTensors& t, Body body) {
  for_dtypes("_gather_gradient: tile", t.tile, [&](auto number, auto arithmetic) {
    if constexpr (std::is_same_v<decltype(number), float>) {
      if (t.out.scalar_type() == ScalarType::BFloat16) return body(number, BFloat16(), arithmetic);
      if (t.out.scalar_type() == ScalarType::Half) return body(number, Half(), arithmetic);
    }
    body(number, number, arithmetic);
  });
}

inline void check_put_rows(const Tensor& out, const Tensor& rows, const Tensor& part) {
  constexpr const char* kOp = "_put_rows";
  STORAGE_OPS_CHECK(out.dim() == 2 && (out.stride(1) == 1 || out.size(1) < 2), kOp,
                    ": `out` must be a matrix with contiguous rows.");
  STORAGE_OPS_CHECK(
      part.dim() == 2 && part.is_contiguous() && part.size(1) == out.size(1) &&
          (part.scalar_type() == out.scalar_type() || part.scalar_type() == arithmetic_of(out)),
      kOp,
      ": `part` must be contiguous, as wide as `out`, in its dtype or that of the arithmetic.");
  check_places(kOp, "rows", rows, part.size(0));
}

}  // namespace storage_ops
