// The arguments of the CPU and the CUDA row kernel, and their checks.
#pragma once

#include "dtypes.h"
#include "row_math.h"

namespace storage_ops {

// Rows of `state`, in the order of RowState, followed by the target's logit.
constexpr int64_t kStateRows = 6;
// Rows of `upstream` in the order of Upstream. Missing rows are 0.
constexpr int64_t kUpstreamRows = 5;
// Phases of a call; see RowArguments.
enum Phase : int64_t { kUpdate = 1, kGradient = 2, kExponentials = 4, kSlope = 8 };

// Tensor arguments of _cross_entropy_rows. Some may be missing.
struct RowTensors {
  Tensor logits, target;
  std::optional<Tensor> bias, weight, upstream;
  Tensor state;
  std::optional<Tensor> argmax;
};

// The other arguments of _cross_entropy_rows.
struct RowOptions {
  int64_t first_column, vocabulary, ignore_index;
  double softcap, logit_scale, label_smoothing;
  int64_t phases;
};

// The arguments in the form of the kernels, for logits of type T and arithmetic of type A.
template <typename T, typename A>
struct RowArguments {
  T* logits;
  const int64_t* index;    // one class per row, or nullptr
  const A* probabilities;  // one distribution per row, or nullptr
  const T* bias;           // bias of the classes, or nullptr
  const A* wide_bias;      // the same in the arithmetic type; at most one of both
  const A* weight;         // weights of the classes
  const A* upstream;       // element (k, i) at k * upstream_outer + i * upstream_inner
  A* state;                // element (k, i) at k * state_stride + i
  int64_t* argmax;
  int64_t rows, columns, stride, probabilities_stride;
  int64_t upstream_count, upstream_outer, upstream_inner, state_stride;
  int64_t first_column;  // the class of column 0 of the logits
  int64_t vocabulary;    // the end of the class indices
  int64_t ignore_index;
  Transform<A> transform;
  A keep, smooth;     // a target's probability q counts as q * keep + smooth
  bool update, grad;  // merge these logits into the state; overwrite them by their gradient
  bool exponentials;  // overwrite them by exp(logit - shift) * d logit / d product instead
  bool slope;         // the entropy is needed

  STORAGE_OPS_INLINE bool spread() const { return probabilities != nullptr || smooth != 0; }

  STORAGE_OPS_INLINE A share_of(A probability, A class_weight) const {
    return (probability * keep + smooth) * class_weight;
  }

  STORAGE_OPS_INLINE A share(int64_t row, int64_t column) const {
    return share_of(probabilities ? probabilities[row * probabilities_stride + column] : A(0),
                    weight ? weight[column] : A(1));
  }

  STORAGE_OPS_INLINE A bias_of(int64_t column) const {
    return bias ? static_cast<A>(bias[column]) : wide_bias ? wide_bias[column] : A(0);
  }

  STORAGE_OPS_INLINE A logit(A product, int64_t column) const {
    return transform.logit(product + bias_of(column));
  }

  STORAGE_OPS_INLINE RowState<A> load_state(int64_t row) const {
    const A* s = state + row;
    return {s[0], s[state_stride], s[2 * state_stride], s[3 * state_stride], s[4 * state_stride]};
  }

  STORAGE_OPS_INLINE void store_state(int64_t row, const RowState<A>& value) const {
    A* s = state + row;
    s[0] = value.shift;
    s[state_stride] = value.sum;
    s[2 * state_stride] = value.slope;
    s[3 * state_stride] = value.dot;
    s[4 * state_stride] = value.mass;
  }

  // The logit of the target, after its column was seen.
  STORAGE_OPS_INLINE A& target_logit(int64_t row) const { return state[5 * state_stride + row]; }

  STORAGE_OPS_INLINE Upstream<A> load_upstream(int64_t row) const {
    const auto at = [&](int64_t k) {
      return k < upstream_count ? upstream[k * upstream_outer + row * upstream_inner] : A(0);
    };
    return {at(0), at(1), at(2), at(3), at(4)};
  }
};

inline void check_rows(const RowTensors& t, bool grad) {
  constexpr const char* kOp = "_cross_entropy_rows: ";
  STORAGE_OPS_CHECK(t.logits.dim() == 2 && (t.logits.stride(1) == 1 || t.logits.size(1) < 2), kOp,
                    "`logits` must be a matrix with contiguous rows.");
  const int64_t rows = t.logits.size(0), columns = t.logits.size(1);
  const ScalarType arithmetic = arithmetic_of(t.logits);
  if (t.target.dim() == 1) {
    STORAGE_OPS_CHECK(t.target.scalar_type() == ScalarType::Long && t.target.size(0) == rows &&
                          t.target.is_contiguous(),
                      kOp, "`target` must be contiguous int64 with one index per row of `logits`.");
  } else {
    STORAGE_OPS_CHECK(
        t.target.dim() == 2 && t.target.scalar_type() == arithmetic && t.target.size(0) == rows &&
            t.target.size(1) == columns && (t.target.stride(1) == 1 || columns < 2),
        kOp,
        "`target` must have the shape of `logits`, contiguous rows and the arithmetic's dtype.");
  }
  STORAGE_OPS_CHECK(
      !t.bias || (t.bias->dim() == 1 && t.bias->size(0) == columns && t.bias->is_contiguous() &&
                  (t.bias->scalar_type() == t.logits.scalar_type() ||
                   t.bias->scalar_type() == arithmetic)),
      kOp,
      "`bias` must be contiguous, of the dtype of `logits` or the arithmetic, one per column.");
  STORAGE_OPS_CHECK(
      !t.weight || (t.weight->dim() == 1 && t.weight->size(0) == columns &&
                    t.weight->is_contiguous() && t.weight->scalar_type() == arithmetic),
      kOp, "`weight` must be contiguous, of the arithmetic's dtype, one per column.");
  STORAGE_OPS_CHECK(
      t.state.scalar_type() == arithmetic && t.state.dim() == 2 && t.state.size(0) == kStateRows &&
          t.state.size(1) == rows && (t.state.stride(1) == 1 || rows < 2),
      kOp, "`state` must be (6, rows) with contiguous rows, in the dtype of the arithmetic.");
  STORAGE_OPS_CHECK(t.upstream.has_value() || !grad, kOp, "`upstream` is needed for the gradient.");
  STORAGE_OPS_CHECK(
      !t.upstream || (t.upstream->scalar_type() == arithmetic && t.upstream->dim() == 2 &&
                      t.upstream->size(0) <= kUpstreamRows &&
                      (t.upstream->size(1) == rows || t.upstream->size(1) == 1)),
      kOp, "`upstream` must be (up to 5, rows or 1), in the dtype of the arithmetic.");
  STORAGE_OPS_CHECK(
      !t.argmax || (t.argmax->scalar_type() == ScalarType::Long && t.argmax->dim() == 1 &&
                    t.argmax->size(0) == rows && t.argmax->is_contiguous()),
      kOp, "`argmax` must be contiguous int64, one per row.");
}

template <typename P>
const P* pointer(const std::optional<Tensor>& t) {
  return t ? static_cast<const P*>(t->const_data_ptr()) : nullptr;
}

template <typename T, typename A>
RowArguments<T, A> row_arguments(const RowTensors& t, const RowOptions& o) {
  const bool index = t.target.dim() == 1;
  RowArguments<T, A> a{};
  a.logits = static_cast<T*>(t.logits.mutable_data_ptr());
  a.index = index ? static_cast<const int64_t*>(t.target.const_data_ptr()) : nullptr;
  a.probabilities = index ? nullptr : static_cast<const A*>(t.target.const_data_ptr());
  const bool wide = t.bias && t.bias->scalar_type() != t.logits.scalar_type();
  a.bias = wide ? nullptr : pointer<T>(t.bias);
  a.wide_bias = wide ? pointer<A>(t.bias) : nullptr;
  a.weight = pointer<A>(t.weight);
  a.upstream = pointer<A>(t.upstream);
  a.state = static_cast<A*>(t.state.mutable_data_ptr());
  a.argmax = t.argmax ? static_cast<int64_t*>(t.argmax->mutable_data_ptr()) : nullptr;
  a.rows = t.logits.size(0);
  a.columns = t.logits.size(1);
  a.stride = t.logits.stride(0);
  a.probabilities_stride = index ? 0 : t.target.stride(0);
  if (t.upstream) {
    a.upstream_count = t.upstream->size(0);
    a.upstream_outer = t.upstream->stride(0);
    a.upstream_inner = t.upstream->size(1) == 1 ? 0 : t.upstream->stride(1);
  }
  a.state_stride = t.state.stride(0);
  a.first_column = o.first_column;
  a.vocabulary = o.vocabulary;
  a.ignore_index = o.ignore_index;
  a.transform = {static_cast<A>(o.logit_scale), static_cast<A>(o.softcap),
                 static_cast<A>(o.softcap == 0 ? 0 : 1 / o.softcap)};
  a.keep = static_cast<A>(1 - o.label_smoothing);
  a.smooth = static_cast<A>(o.label_smoothing / static_cast<double>(o.vocabulary));
  a.update = o.phases & kUpdate;
  a.grad = o.phases & kGradient;
  a.exponentials = o.phases & kExponentials;
  a.slope = o.phases & kSlope;
  return a;
}

}  // namespace storage_ops
