// The formulas of a row of cross-entropy, shared by the CPU and the CUDA kernels.
//
// A matrix product y becomes a logit z = cap(scale * (y + bias)), cap(u) = softcap * tanh(u /
// softcap) or u. For a row of logits the kernels keep sums that do not overflow and can be merged:
//   shift = max_j z_j,  sum = sum_j e_j,  slope = sum_j e_j (z_j - shift),  e_j = exp(z_j - shift)
//   mass = sum_j u_j,   dot = sum_j u_j (z_j - shift)
// u_j is the share of class j in a smoothed target: smoothing / V, or the class's probability,
// times the weight of the class. With p_j = e_j / sum:
//   lse           = shift + log(sum)                     d / dz_j = p_j
//   nll           = log(sum) - (z_t - shift)             d / dz_j = p_j - [j == t]
//   cross-entropy = mass log(sum) - dot                  d / dz_j = mass p_j - u_j
//   entropy       = log(sum) - slope / sum               d / dz_j = -p_j (z_j - lse + entropy)
// The running maximum and its merge are those of online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define STORAGE_OPS_INLINE __host__ __device__ __forceinline__
#else
#define STORAGE_OPS_INLINE inline __attribute__((always_inline))
#endif
#if defined(__CUDA_ARCH__)
#include <device.cuh>
#endif

namespace storage_ops {

// Constants of exp for floats. With n = round(x / ln 2) and r = x - n ln 2, exp(x) is 2^n times a
// polynomial in r. Its relative error is at most 3.1e-9 for |r| <= ln(2)/2. It is the best of
// degree 6 with value 1 and slope 1 at 0, by Remez' algorithm.
struct Exponential {
  static constexpr float kInverseLn2 = 1.44269504f;
  // 1.5 * 2^23: adding it rounds to the nearest integer.
  static constexpr float kRound = 12582912.0f;
  static constexpr float kLn2 = 0.693359375f, kLn2Rest = -2.12194440e-4f;
  static constexpr float kTerms[] = {0.00138145406f, 0.00836874545f, 0.0416683890f, 0.166665211f,
                                     // Coefficients from r^6 to r^0.
                                     0.499999940f, 1.0f, 1.0f};
  static constexpr float kLeast = -87.3f;  // below this the result is under 2^-126, and becomes 0
};

// exp of a float in plain arithmetic that compilers vectorize, with a relative error below 2 ulp
// for x <= 0. A GPU has an instruction for 2^x. Because x / ln 2 is rounded, its error is 2 + 1.2
// |x| ulp.
STORAGE_OPS_INLINE float exponential(float x) {
#if defined(__CUDA_ARCH__)
  return exp2_approx(x * Exponential::kInverseLn2);
#else
  using E = Exponential;
  const float shifted = x * E::kInverseLn2 + E::kRound;
  const float n = shifted - E::kRound;
  const float r = (x - n * E::kLn2) - n * E::kLn2Rest;
  float p = E::kTerms[0];
  p = p * r + E::kTerms[1];
  p = p * r + E::kTerms[2];
  p = p * r + E::kTerms[3];
  p = p * r + E::kTerms[4];
  p = p * r + E::kTerms[5];
  p = p * r + E::kTerms[6];
  uint32_t bits;  // wraps around if the result is 0
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < E::kLeast ? 0.0f : p * power;
#endif
}

STORAGE_OPS_INLINE double exponential(double x) { return ::exp(x); }

// Returns a / b for b from 1 to 2.
STORAGE_OPS_INLINE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);  // error of 2 ulp, without code for extreme values
#else
  return a / b;
#endif
}

// tanh from exp of a negative number, or from its Taylor series where exp would cancel.
STORAGE_OPS_INLINE float hyperbolic_tangent(float u) {
  const float size = u < 0 ? -u : u;
  const float e = exponential(-2 * size);
  const float large = quotient(1 - e, 1 + e);
  const float s = u * u;
  float p = 62.0f / 2835;
  p = p * s - 17.0f / 315;
  p = p * s + 2.0f / 15;
  p = p * s - 1.0f / 3;
  const float small = size + size * s * p;
  const float value = size < 0.25f ? small : large;
  return u < 0 ? -value : value;
}

STORAGE_OPS_INLINE double hyperbolic_tangent(double u) { return ::tanh(u); }

// Turns a matrix product into a logit. softcap == 0 means none, and then its inverse is 0, too.
template <typename A>
struct Transform {
  A scale, softcap, inverse_softcap;

  STORAGE_OPS_INLINE A logit(A product) const {
    const A u = product * scale;
    return softcap == 0 ? u : softcap * hyperbolic_tangent(u * inverse_softcap);
  }
  // Returns d logit / d product, from the logit.
  STORAGE_OPS_INLINE A slope(A logit) const {
    const A t = softcap == 0 ? A(0) : logit * inverse_softcap;
    return scale * (1 - t * t);
  }
};

// The state of the logits of a row so far. sum == 0 means no logits, or only -inf. If the sum is
// nan, the shift is nan if a logit was nan, and inf otherwise.
template <typename A>
struct RowState {
  A shift = 0, sum = 0, slope = 0, dot = 0, mass = 0;

  STORAGE_OPS_INLINE A max() const {
    return sum == 0 ? -std::numeric_limits<A>::infinity() : shift;
  }
};

// Returns the larger number, or nan if one is nan, like torch.
template <typename A>
STORAGE_OPS_INLINE A maximum(A a, A b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(A) == sizeof(float)) return max_nan(a, b);
#endif
  return a > b || a != a ? a : b;
}

// Returns the number to subtract before exp: the maximum, but 0 while every logit is -inf.
template <typename A>
STORAGE_OPS_INLINE A shift_of(A max) {
  return max == -std::numeric_limits<A>::infinity() ? A(0) : max;
}

// Returns z * weight, but 0 for a weight of 0 even if z is infinite: the limit of p log p.
template <typename A>
STORAGE_OPS_INLINE A weighted(A weight, A z) {
  return weight == 0 ? A(0) : weight * z;
}

template <typename A>
STORAGE_OPS_INLINE RowState<A> moved(RowState<A> s, A shift) {
  const A by = s.shift - shift, e = exponential(by), factor = s.sum == 0 ? A(0) : e;
  s.slope = weighted(factor, s.slope + weighted(s.sum, by));
  s.dot += weighted(s.mass, by);
  s.sum *= factor;
  s.shift = shift;
  return s;
}

template <typename A>
STORAGE_OPS_INLINE RowState<A> merge(const RowState<A>& a, const RowState<A>& b) {
  const A max = maximum(a.max(), b.max());
  const RowState<A> p = moved(a, shift_of(max)), q = moved(b, shift_of(max));
  return {p.shift, p.sum + q.sum, p.slope + q.slope, p.dot + q.dot, p.mass + q.mass};
}

// Upstream gradients of a row (see storage_ops/loss/formulas.py), with respect to (p_j - [j == t]),
// (mass p_j - u_j), lse, the entropy, and lse^2 / 2.
template <typename A>
struct Upstream {
  A target = 0, spread = 0, lse = 0, entropy = 0, square = 0;
};

// The gradient of a row's outputs with respect to its logits.
template <typename A>
struct RowGradient {
  A shift, inverse_sum;  // p_j = exp(z_j - shift) * inverse_sum
  A probability, spread, target;
  A entropy, offset;  // d entropy / dz_j = -p_j (z_j - shift + offset)

  STORAGE_OPS_INLINE RowGradient(const RowState<A>& state, const Upstream<A>& up) {
    shift = state.shift;
    inverse_sum = 1 / state.sum;
    probability = up.target + weighted(up.spread, state.mass) + up.lse;
    if (up.square != 0) probability += up.square * (shift + ::log(state.sum));
    spread = up.spread;
    target = up.target;
    entropy = up.entropy;
    offset = -state.slope * inverse_sum;
  }

  STORAGE_OPS_INLINE A at(A logit, A share) const {
    const A p = exponential(logit - shift) * inverse_sum;
    const A common = p * probability - weighted(spread, share);
    return entropy == 0 ? common : common - entropy * weighted(p, logit - shift + offset);
  }
};

}  // namespace storage_ops
