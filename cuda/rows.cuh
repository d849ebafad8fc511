// The parts of a row of cross-entropy that both forms of the row kernel share.
#pragma once

#include "launch.cuh"
#include "rows/cross_entropy_rows.h"

namespace storage_ops::kernels {

enum class Target { kClass, kIgnored, kOutside };

// Returns what the target of a row is. A distribution is a class here.
template <typename T, typename A>
__device__ __forceinline__ Target target_of(const RowArguments<T, A>& a, int64_t index) {
  if (a.index == nullptr) return Target::kClass;
  if (index == a.ignore_index) return Target::kIgnored;
  return index < 0 || index >= a.vocabulary ? Target::kOutside : Target::kClass;
}

// Returns the gradient of a row whose target is not a class.
template <typename A>
__device__ __forceinline__ A gradient_without_class(Target target) {
  return target == Target::kIgnored ? A(0) : std::numeric_limits<A>::quiet_NaN();
}

// Stores the results of a row whose target is not a class.
template <typename T, typename A>
__device__ __forceinline__ void store_without_class(const RowArguments<T, A>& a, int64_t row,
                                                    Target target) {
  a.store_state(
      row, {0, target == Target::kIgnored ? A(1) : gradient_without_class<A>(target), 0, 0, 0});
  a.target_logit(row) = 0;
  if (a.argmax != nullptr) a.argmax[row] = -1;
}

// The first maximum of a row is the least rank of its columns. The rank of a column with a nan is
// its number, and that of a column with the maximum is a.columns more. Other columns have this
// rank:
template <typename T, typename A>
__device__ __forceinline__ int64_t rank_of_none(const RowArguments<T, A>& a) {
  return 2 * a.columns;
}

// Stores the class of the column with the first rank of a tile, unless an earlier tile has the
// maximum. `now` is the state of this tile, with or without the earlier ones.
template <typename T, typename A>
__device__ __forceinline__ void store_argmax(const RowArguments<T, A>& a, int64_t row,
                                             const RowState<A>& previous, const RowState<A>& now,
                                             int64_t rank) {
  if (previous.max() != previous.max()) return;
  if (rank < a.columns) {
    a.argmax[row] = a.first_column + rank;
  } else if (rank < rank_of_none(a) && now.max() > previous.max()) {
    a.argmax[row] = a.first_column + rank - a.columns;
  }
}

// Returns the gradient of a row, or its exponentials if the call asks for these.
template <typename T, typename A>
__device__ __forceinline__ RowGradient<A> gradient_of_row(const RowArguments<T, A>& a,
                                                          const RowState<A>& state,
                                                          const Upstream<A>& upstream) {
  RowGradient<A> gradient(state, upstream);
  if (!a.grad) gradient.inverse_sum = gradient.probability = 1;
  return gradient;
}

}  // namespace storage_ops::kernels
