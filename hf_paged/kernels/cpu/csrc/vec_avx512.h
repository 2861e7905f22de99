// Sixteen float32 numbers at a time: AVX-512 F, BW, DQ and VL, which every AVX-512 server has.
//
// A kernel header is written once against the names of this file and compiled once per instruction set, each time
// inside its own namespace (`KERNEL_NAMESPACE`). Such a file includes no C++ library header: an inline function that
// two translation units share would be kept once by the linker, perhaps in the version that this machine cannot run.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "dtype.h"

#define KERNEL_NAMESPACE avx512

namespace hf_paged {
namespace avx512 {

#define INLINE static inline __attribute__((always_inline))

constexpr int W = 16;  // lanes
typedef __m512 Vec;

INLINE __mmask16 first(int n) { return (__mmask16)(n >= W ? 0xffff : (1u << n) - 1); }
INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec set(float x) { return _mm512_set1_ps(x); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a); }
INLINE float highest(Vec a) { return _mm512_reduce_max_ps(a); }
// The first n lanes of a, and b elsewhere.
INLINE Vec select_first(int n, Vec a, Vec b) { return _mm512_mask_blend_ps(first(n), b, a); }
// Exchanges the numbers of each pair of neighbours.
INLINE Vec swap_pairs(Vec a) { return _mm512_permute_ps(a, 0xb1); }
// a where x is negative (or -0), b elsewhere.
INLINE Vec select_negative(Vec x, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), b, a);
}
INLINE Vec round_even(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2 ** n for whole n from -250 to 250, through infinity and denormal numbers.
INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }

// x where a < b, and y elsewhere.
INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

INLINE Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Vec load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// The first n numbers, and zero beyond; memory beyond them is not touched.
INLINE Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE Vec load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE Vec load(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }

INLINE Vec load(const q8* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// float8 e4m3 as float16 with the same bits, whose exponent counts from 15 instead of 7: 1/256 of the number.
INLINE Vec load(const e4m3* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80)));
}
// float8 e5m2 is the upper half of a float16.
INLINE Vec load(const e5m2* p) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8));
}
// 32 numbers in 16 bytes: byte i holds number i in its low half and number i + 16 in its high one.
INLINE void load_chunk(const q4* p, Vec out[32 / W]) {
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  out[0] = _mm512_cvtepi32_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(15)));
  out[1] = _mm512_cvtepi32_ps(_mm512_srli_epi32(pairs, 4));
}

// To the nearest bf16, the even one of two, in the upper half of each lane; a NaN stays one.
INLINE __m512i rounded(Vec x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x00400000));
}
INLINE __m256i narrow(Vec x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(x), 16)); }
// Pairs of bf16, one in a lane.
INLINE Vec bf16_pairs(Vec first, Vec second) {
  const __m512i high = _mm512_and_si512(rounded(second), _mm512_set1_epi32((int)0xffff0000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(rounded(first), 16), high));
}
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE void store(bf16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
INLINE void store(f16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
INLINE void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
INLINE void store(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
INLINE void store(f16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, 0)); }

// 2 ** x, relative error 2e-7; 2 ** -126 below; a NaN stays one.
INLINE Vec exp2(Vec x) {
  x = max(set(-126.f), x);  // in this order, since the processor returns the second of two where one is NaN
  const Vec whole = _mm512_roundscale_ps(x, 8), f = sub(x, whole);
  Vec p = set(1.3333558e-3f);
  p = fma(p, f, set(9.6181291e-3f));
  p = fma(p, f, set(5.5504109e-2f));
  p = fma(p, f, set(2.4022651e-1f));
  p = fma(p, f, set(6.9314718e-1f));
  p = fma(p, f, set(1.f));
  return _mm512_scalef_ps(p, whole);
}

// The sum of each of 16 vectors, in order.
INLINE Vec sums(const Vec v[W]) {
  Vec t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    t[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const Vec a = add(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const Vec b = add(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// One bit per lane, the first lane's the lowest: a >= b, a > b, a is NaN. Comparisons with NaN are false.
INLINE uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE uint32_t is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

// Transposes 16 rows of 16 numbers in place.
INLINE void transpose(Vec r[W]) {
  Vec t[W];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#define PAIR(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = PAIR(_mm512_unpacklo_pd, t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = PAIR(_mm512_unpackhi_pd, t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = PAIR(_mm512_unpacklo_pd, t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = PAIR(_mm512_unpackhi_pd, t[4 * i + 1], t[4 * i + 3]);
  }
#undef PAIR
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x88);
    r[8 + i] = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xdd);
  }
}

}  // namespace avx512
}  // namespace hf_paged
