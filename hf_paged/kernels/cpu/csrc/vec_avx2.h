// Eight float32 numbers at a time: AVX2, FMA and F16C. The same names as in vec_avx512.h; see there.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "dtype.h"

#define KERNEL_NAMESPACE avx2

namespace hf_paged {
namespace avx2 {

#define INLINE static inline __attribute__((always_inline))

constexpr int W = 8;  // lanes
typedef __m256 Vec;

INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec set(float x) { return _mm256_set1_ps(x); }
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float highest(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE Vec select_first(int n, Vec a, Vec b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first(n))); }
INLINE Vec swap_pairs(Vec a) { return _mm256_permute_ps(a, 0xb1); }
INLINE Vec select_negative(Vec x, Vec a, Vec b) { return _mm256_blendv_ps(b, a, x); }
INLINE Vec round_even(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec scale_by_power(Vec a, Vec n) {  // in two steps, since one exponent ends at 127
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  a = mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

INLINE Vec widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE __m128i load_some(const void* p, int n) {
  uint16_t some[W] = {0};
  memcpy(some, p, sizeof(uint16_t) * (n < W ? n : W));
  return _mm_loadu_si128((const __m128i*)some);
}
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE Vec load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
INLINE Vec load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
INLINE Vec load(const bf16* p, int n) { return widen(load_some(p, n)); }
INLINE Vec load(const f16* p, int n) { return _mm256_cvtph_ps(load_some(p, n)); }

INLINE Vec load(const q8* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE Vec load(const e4m3* p) {
  const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xbf80)));
}
INLINE Vec load(const e5m2* p) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p)));
}
INLINE void load_chunk(const q4* p, Vec out[32 / W]) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * W)));
    out[i] = _mm256_cvtepi32_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(15)));
    out[i + 2] = _mm256_cvtepi32_ps(_mm256_srli_epi32(pairs, 4));
  }
}

INLINE __m256i rounded(Vec x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x00400000)), nan);
}
INLINE __m128i narrow(Vec x) {
  const __m256i r = _mm256_srli_epi32(rounded(x), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
INLINE Vec bf16_pairs(Vec first, Vec second) {
  const __m256i high = _mm256_and_si256(rounded(second), _mm256_set1_epi32((int)0xffff0000));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32(rounded(first), 16), high));
}
INLINE void store_some(void* p, __m128i x, int n) {
  uint16_t some[W];
  _mm_storeu_si128((__m128i*)some, x);
  memcpy(p, some, sizeof(uint16_t) * (n < W ? n : W));
}
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE void store(bf16* p, Vec x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
INLINE void store(f16* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
INLINE void store(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first(n), x); }
INLINE void store(bf16* p, Vec x, int n) { store_some(p, narrow(x), n); }
INLINE void store(f16* p, Vec x, int n) { store_some(p, _mm256_cvtps_ph(x, 0), n); }

INLINE Vec exp2(Vec x) {
  x = max(set(-126.f), x);  // in this order, since the processor returns the second of two where one is NaN
  const Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(x, whole);
  Vec p = set(1.3333558e-3f);
  p = fma(p, f, set(9.6181291e-3f));
  p = fma(p, f, set(5.5504109e-2f));
  p = fma(p, f, set(2.4022651e-1f));
  p = fma(p, f, set(6.9314718e-1f));
  p = fma(p, f, set(1.f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return mul(p, _mm256_castsi256_ps(exponent));
}

// The sum of each of 8 vectors, in order.
INLINE Vec sums(const Vec v[W]) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

INLINE uint32_t at_least(Vec a, Vec b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INLINE uint32_t above(Vec a, Vec b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INLINE uint32_t is_nan(Vec a) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

// Transposes 8 rows of 8 numbers in place.
INLINE void transpose(Vec r[W]) {
  Vec t[W], u[W];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}

}  // namespace avx2
}  // namespace hf_paged
