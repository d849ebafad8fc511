// The formulas of a row of cross-entropy, once, for the CPU and the CUDA kernel alike.
//
// For logits x, target t and scale c (the upstream gradient of the row's loss):
//   lse  = log(sum_j exp(x_j))                     log-sum-exp, from a running maximum
//   nll  = lse - x_t                               the loss
//   dx_j = (exp(x_j - lse) - [j == t]) * c         its gradient
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

namespace storage_ops {

// exp of a float in plain arithmetic that compilers turn into vector code; relative error below
// 2 ulp for x <= 0, results under 2^-126 are 0. With n = round(x / ln 2) and r = x - n ln 2, it is
// 2^n times the Taylor series of exp(r), |r| <= ln(2)/2, whose eighth term is below 1e-8.
STORAGE_OPS_INLINE float exponential(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.3f ? 0.0f : p * power;
#endif
}

STORAGE_OPS_INLINE double exponential(double x) { return ::exp(x); }

// Maximum of the logits seen so far, and the sum of exp(logit - maximum).
template <typename T>
struct SoftmaxState {
  T max = -std::numeric_limits<T>::infinity();
  T sum = 0;
};

// What to subtract before exp: the maximum, but 0 when every logit so far is -inf.
template <typename T>
STORAGE_OPS_INLINE T shift_of(T max) {
  return max == -std::numeric_limits<T>::infinity() ? T(0) : max;
}

template <typename T>
STORAGE_OPS_INLINE SoftmaxState<T> merge(SoftmaxState<T> a, SoftmaxState<T> b) {
  const T max = a.max > b.max ? a.max : b.max;
  const T shift = shift_of(max);
  return {max, a.sum * exponential(a.max - shift) + b.sum * exponential(b.max - shift)};
}

template <typename T>
STORAGE_OPS_INLINE T log_sum_exp(SoftmaxState<T> state) {
  return state.max + ::log(state.sum);
}

template <typename T>
STORAGE_OPS_INLINE T negative_log_likelihood(T lse, T target_logit) {
  return lse - target_logit;
}

// Gradient of a row's loss with respect to one logit that is not the target.
template <typename T>
STORAGE_OPS_INLINE T gradient(T logit, T lse, T scale) {
  return exponential(logit - lse) * scale;
}

// The same for the target. Formed before any rounding to 16 bits, in which p - 1 loses most.
template <typename T>
STORAGE_OPS_INLINE T target_gradient(T logit, T lse, T scale) {
  return (exponential(logit - lse) - T(1)) * scale;
}

}  // namespace storage_ops
