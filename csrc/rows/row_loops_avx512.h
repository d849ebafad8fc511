// The loops over a row of logits that are unchanged products (see is_bare), in AVX-512 with BF16.
// They only need exp. They process four vectors at a time to hide latencies, and mask the columns
// that do not fill a vector.
#pragma once

#include <algorithm>
#include <cmath>

#include "processor.h"
#include "row_math.h"
#include "stable.h"

#if defined(STORAGE_OPS_X86)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")

namespace storage_ops::avx512 {

// Forces inlining of lambdas, which compilers do not always inline.
#define STORAGE_OPS_INLINED __attribute__((always_inline))

constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = 4;
// Bytes to prefetch ahead, because the hardware stops at the end of a page.
constexpr int64_t kAhead = 2048;

// Loads sixteen logits, with -inf for those that the mask excludes.
STORAGE_OPS_INLINE __m512 load(const float* from, __mmask16 mask) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, from);
}

STORAGE_OPS_INLINE __m512 load(const BFloat16* from, __mmask16 mask) {
  const __m256i none = _mm256_set1_epi16(static_cast<int16_t>(0xff80));
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_mask_loadu_epi16(none, mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

STORAGE_OPS_INLINE __m512 load(const Half* from, __mmask16 mask) {
  const __m256i none = _mm256_set1_epi16(static_cast<int16_t>(0xfc00));
  return _mm512_cvtph_ps(_mm256_mask_loadu_epi16(none, mask, from));
}

// Rounds to nearest. A bf16 below 2^-126 becomes 0, as in the products.
STORAGE_OPS_INLINE void store(float* to, __mmask16 mask, __m512 value) {
  _mm512_mask_storeu_ps(to, mask, value);
}

STORAGE_OPS_INLINE void store(BFloat16* to, __mmask16 mask, __m512 value) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

STORAGE_OPS_INLINE void store(Half* to, __mmask16 mask, __m512 value) {
  const __m256i rounded = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(to, mask, rounded);
}

STORAGE_OPS_INLINE __m512 all(float value) { return _mm512_set1_ps(value); }

// Computes `exponential` of several vectors, also for positive numbers.
template <int64_t kCount>
STORAGE_OPS_INLINE void exponentials(__m512 (&x)[kCount]) {
  using E = Exponential;
  __mmask16 whole[kCount];  // where the result is not replaced by 0; a nan stays
  __m512 n[kCount], p[kCount];
#define STORAGE_OPS_EACH _Pragma("GCC unroll 4") for (int64_t v = 0; v < kCount; ++v)
  STORAGE_OPS_EACH whole[v] = _mm512_cmp_ps_mask(x[v], all(E::kLeast), _CMP_NLT_UQ);
  STORAGE_OPS_EACH n[v] = _mm512_fmadd_ps(x[v], all(E::kInverseLn2), all(E::kRound));
  STORAGE_OPS_EACH n[v] = _mm512_sub_ps(n[v], all(E::kRound));
  STORAGE_OPS_EACH x[v] = _mm512_fnmadd_ps(n[v], all(E::kLn2), x[v]);
  STORAGE_OPS_EACH x[v] = _mm512_fnmadd_ps(n[v], all(E::kLn2Rest), x[v]);
  STORAGE_OPS_EACH p[v] = all(E::kTerms[0]);
#pragma GCC unroll 6
  for (int64_t term = 1; term < 7; ++term)
    STORAGE_OPS_EACH p[v] = _mm512_fmadd_ps(p[v], x[v], all(E::kTerms[term]));
  STORAGE_OPS_EACH x[v] = _mm512_maskz_scalef_ps(whole[v], p[v], n[v]);
}
#undef STORAGE_OPS_EACH

// Calls `body<count>(begin, mask)` for every part of a row, which has `count` vectors from `begin`
// on.
template <typename T, typename Body>
STORAGE_OPS_INLINE void for_parts(const T* row, int64_t columns, Body body) {
  constexpr int64_t kPart = kVectors * kLanes, kLine = 64 / sizeof(T);
  int64_t begin = 0;
  for (; begin + kPart <= columns; begin += kPart) {
    const auto* ahead = reinterpret_cast<const char*>(row + begin) + kAhead;
#pragma GCC unroll 4
    for (int64_t j = 0; j < kPart / kLine; ++j) __builtin_prefetch(ahead + 64 * j);
    body.template operator()<kVectors>(begin, 0xffff);
  }
  for (; begin < columns; begin += kLanes) {
    const int64_t left = std::min(columns - begin, kLanes);
    body.template operator()<1>(begin, static_cast<__mmask16>((1 << left) - 1));
  }
}

// Merges a row of logits into its state. Returns false without an effect if some logits are not
// finite, or far above earlier ones. The row is read once: exp is relative to the maximum so far,
// or to the maximum of the first columns.
template <typename T>
bool update(const T* row, int64_t columns, RowState<float>& state) {
  constexpr float kFar = 60;        // exp(kFar), times the size of a vocabulary, does not overflow
  constexpr int64_t kFirst = 256;   // columns whose maximum is used first
  constexpr int64_t kBlock = 2048;  // columns that are summed before they are added to the total
  float shift = state.shift;
  if (state.sum == 0) {
    __m512 max = _mm512_set1_ps(-INFINITY);
    for_parts(row, std::min(columns, kFirst),
              [&]<int64_t kCount>(int64_t begin, __mmask16 mask) STORAGE_OPS_INLINED {
                for (int64_t v = 0; v < kCount; ++v)
                  max = _mm512_max_ps(max, load(row + begin + v * kLanes, mask));
              });
    shift = _mm512_reduce_max_ps(max);
  }
  if (!std::isfinite(shift)) return false;
  const __m512 shifts = _mm512_set1_ps(shift);
  __m512 max[kVectors], total = _mm512_setzero_ps();
  for (__m512& vector : max) vector = _mm512_set1_ps(-INFINITY);
  for (int64_t first = 0; first < columns; first += kBlock) {
    __m512 sum[kVectors] = {};
    const T* block = row + first;
    const int64_t n = std::min(columns - first, kBlock);
    for_parts(block, n, [&]<int64_t kCount>(int64_t begin, __mmask16 mask) STORAGE_OPS_INLINED {
      __m512 x[kCount];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kCount; ++v) {
        x[v] = load(block + begin + v * kLanes, mask);
        max[v] = _mm512_max_ps(max[v], x[v]);
        x[v] = _mm512_sub_ps(x[v], shifts);
      }
      exponentials(x);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kCount; ++v) sum[v] = _mm512_add_ps(sum[v], x[v]);
    });
    total = _mm512_add_ps(
        total, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
  }
  const __m512 largest =
      _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
  const float highest = _mm512_reduce_max_ps(largest), sum = _mm512_reduce_add_ps(total);
  if (!(highest - shift <= kFar) || std::isnan(sum)) return false;
  const float top = std::max(state.max(), highest);
  state.shift = shift, state.sum += sum;
  if (top != shift) state = moved(state, top);
  return true;
}

// Overwrites a row of logits by exp(logit - shift) * factor.
template <typename T>
void overwrite(T* row, int64_t columns, float shift, float factor) {
  const __m512 shifts = _mm512_set1_ps(shift), factors = _mm512_set1_ps(factor);
  for_parts(row, columns, [&]<int64_t kCount>(int64_t begin, __mmask16 mask) STORAGE_OPS_INLINED {
    __m512 x[kCount];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kCount; ++v)
      x[v] = _mm512_sub_ps(load(row + begin + v * kLanes, mask), shifts);
    exponentials(x);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kCount; ++v)
      store(row + begin + v * kLanes, mask, _mm512_mul_ps(x[v], factors));
  });
}

}  // namespace storage_ops::avx512

#undef STORAGE_OPS_INLINED
#pragma GCC pop_options
#endif
