// The formulas of a class in the divergence of two heads, shared by all kernels.
//
// With p the student's probability of the class, q the teacher's, a = log p, b = log q, and
// m = beta q + (1 - beta) p, a row sums `value`, and `center`, and a logit's gradient is as
// follows. A probability of 0 makes its term 0, although its logarithm may be -inf: 0 log 0 is 0.
//   forward  q (b - a)                                   p - q
//   reverse  p (a - b)                                   p (a - b - center), center the value
//   jsd      beta q (b - log m) + (1 - beta) p (a - log m)
//                                                        (1 - beta) p (a - log m - center),
//                                                        center the sum of p (a - log m)
//   tvd      |p - q| / 2                                 p (s - center), s from -1/2 to 1/2 the
//                                                        sign of a - b, center the sum of p s
#pragma once

#include "row_math.h"

namespace storage_ops {

enum class Divergence { kForward, kReverse, kJsd, kTvd };

// log of a normal float in plain arithmetic that compilers vectorize, with a relative error below 2
// ulp. The polynomial is that of Cephes (Moshier 1989), for f from 1/sqrt(2) to sqrt(2).
STORAGE_OPS_INLINE float logarithm(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t above = bits - 0x3f3504f3;  // relative to the bits of 1/sqrt(2)
  const auto n = static_cast<float>(static_cast<int32_t>(above) >> 23);
  bits = (above & 0x7fffff) + 0x3f3504f3;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  f -= 1;
  const float square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float rest = p * f * square - n * 2.12194440e-4f - 0.5f * square;
  return f + rest + n * 0.693359375f;
}

STORAGE_OPS_INLINE double logarithm(double x) { return ::log(x); }

// The steepness of the sign of tvd where a and b are nearly equal. A jump would let rounding decide
// the sign. Products of other tiles round in another way. So `center` could have one sign and its
// class the other, and the gradient of a class of probability 1 would be 1 instead of 0.
template <typename A>
constexpr A kSteepness = static_cast<A>(sizeof(A) == sizeof(float) ? 0x1p12 : 0x1p38);

// The formulas take and return numbers, because compilers do not vectorize structs.

// Returns log m.
template <typename A>
STORAGE_OPS_INLINE A log_mixture(A p, A q, A beta) {
  const A m = beta * q + (1 - beta) * p, least = std::numeric_limits<A>::min();
  return logarithm(m < least ? least : m);
}

// Returns the factor of p in the gradient of the student's side, before the center is subtracted.
// `m` is log m for jsd. The factor may be nan if p is 0.
template <Divergence kKind, typename A>
STORAGE_OPS_INLINE A slope_of(A a, A b, A m) {
  if constexpr (kKind == Divergence::kReverse) return a - b;
  if constexpr (kKind == Divergence::kJsd) return a - m;
  const A sign = (a - b) * kSteepness<A>;
  return sign > A(0.5) ? A(0.5) : (sign < A(-0.5) ? A(-0.5) : sign);
}

// Returns the contribution of a class to the value of its row.
template <Divergence kKind, typename A>
STORAGE_OPS_INLINE A value_of(A a, A b, A p, A q, A m, A beta) {
  if constexpr (kKind == Divergence::kForward) return weighted(q, b - a);
  if constexpr (kKind == Divergence::kReverse) return weighted(p, a - b);
  if constexpr (kKind == Divergence::kJsd) {
    return beta * weighted(q, b - m) + (1 - beta) * weighted(p, a - m);
  }
  return (p > q ? p - q : q - p) * A(0.5);
}

template <Divergence kKind, typename A>
STORAGE_OPS_INLINE A gradient_of(A a, A b, A p, A q, A m, A beta, A center) {
  if constexpr (kKind == Divergence::kForward) return p - q;
  const A value = weighted(p, slope_of<kKind>(a, b, m) - center);
  return kKind == Divergence::kJsd ? (1 - beta) * value : value;
}

}  // namespace storage_ops
