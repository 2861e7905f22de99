// Quantized K/V, as kernels/quantized_blocks.py describes it: a code of one byte for each number of a head, and a
// float16 scale for all of them. Written against vec_avx512.h or vec_avx2.h.
#pragma once
#include "dtype.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// UNIT: what a loaded code of 1 stands for. A float8 has BITS of mantissa, and equally spaced numbers below the
// exponent LOWEST.
template <class T>
struct Codes {
  static constexpr bool ARE = false;
};
template <>
struct Codes<q8> {
  static constexpr bool ARE = true;
  static constexpr float UNIT = 1, LARGEST = 127;
};
template <>
struct Codes<e4m3> {
  static constexpr bool ARE = true;
  static constexpr float UNIT = 256, LARGEST = 448;
  static constexpr int BITS = 3, LOWEST = -6;
};
template <>
struct Codes<e5m2> {
  static constexpr bool ARE = true;
  static constexpr float UNIT = 1, LARGEST = 448;
  static constexpr int BITS = 2, LOWEST = -14;
};

// The first n codes, and zero beyond; memory beyond them is not touched.
template <class T>
INLINE Vec load_some_codes(const T* p, int n) {
  T some[W] = {};
  memcpy(some, p, n < W ? n : W);
  return load(some);
}
INLINE Vec load(const q8* p, int n) { return load_some_codes(p, n); }
INLINE Vec load(const e4m3* p, int n) { return load_some_codes(p, n); }
INLINE Vec load(const e5m2* p, int n) { return load_some_codes(p, n); }

// Turns W numbers into codes; they are within the largest one.
INLINE void encode(const float* x, q8* codes) {
  float whole[W];
  store(whole, round_even(load(x)));
  for (int i = 0; i < W; i++) codes[i].bits = (int8_t)whole[i];
}

// To the nearest number that the float8 has, the even one of two: what is added leaves only its bits.
template <class T>
INLINE float rounded_to(float x) {
  uint32_t exponent, lowest = (uint32_t)(127 + Codes<T>::LOWEST) << 23;
  memcpy(&exponent, &x, sizeof(x));
  exponent &= 0x7f800000;
  exponent = ((exponent < lowest ? lowest : exponent) + ((uint32_t)(23 - Codes<T>::BITS) << 23)) | 0x400000;
  float magic;
  memcpy(&magic, &exponent, sizeof(magic));
  return (x + magic) - magic;
}

// The numbers as float16, of which a float8 is the upper part: e4m3 with an exponent of another origin, one bit lower.
template <class T>
INLINE void encode(const float* x, T* codes) {
  float numbers[W];
  uint16_t halves[W];
  for (int i = 0; i < W; i++) numbers[i] = rounded_to<T>(x[i]) * (1 / Codes<T>::UNIT);
  store((f16*)halves, load(numbers));
  constexpr int SHIFT = 10 - Codes<T>::BITS;
  for (int i = 0; i < W; i++) codes[i].bits = (uint8_t)((halves[i] >> 8 & 0x80) | (halves[i] >> SHIFT & 0x7f));
}

constexpr int64_t padded_head(int64_t n) { return (n + W - 1) / W * W; }

// Turns a head of n numbers, which zeros fill up to a multiple of W, into codes and a scale.
template <class T>
static void quantize(float* x, int64_t n, T* codes, f16* scale) {
  Vec top = zero();
  uint32_t nan = 0;
  for (int64_t d = 0; d < n; d += W) {
    const Vec a = load(x + d);
    nan |= is_nan(a);
    top = max(top, max(a, sub(zero(), a)));
  }
  const float largest = nan ? __builtin_nanf("") : highest(top);
  scale->bits = _cvtss_sh(largest / Codes<T>::LARGEST, 0);
  const float wide = _cvtsh_ss(scale->bits);
  if (!(wide > 0 && wide < __builtin_inff())) {  // zeros, or NaN by its scale
    memset(codes, 0, n);
    return;
  }
  const Vec divisor = set(wide), high = set(Codes<T>::LARGEST), low = set(-Codes<T>::LARGEST);
  T some[W];
  for (int64_t d = 0; d < n; d += W) {
    store(x + d, max(low, min(high, div(load(x + d), divisor))));
    const bool whole = d + W <= n;
    encode(x + d, whole ? codes + d : some);
    if (!whole) memcpy(codes + d, some, n - d);
  }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
