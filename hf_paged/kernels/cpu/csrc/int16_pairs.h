// Products of int8 numbers widened to int16, two neighbouring k in a lane; include it after vec_avx512.h or vec_avx2.h.
#pragma once
namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

#ifdef __AVX512BW__
typedef __m512i IntVec;
#define OF_BOTH(name) _mm512_##name
#else
typedef __m256i IntVec;
#define OF_BOTH(name) _mm256_##name
#endif
typedef IntVec WordVec;

struct Ints {
  static constexpr int UNIT = 2;
  static constexpr int CODES = W * UNIT;  // codes of a vector
  static constexpr float OFFSET = 0;      // what is added to the codes of weights
  static constexpr int rows_of(int vectors) { return W == 16 ? (vectors == 4 ? 6 : 8) : vectors == 2 ? 6 : 8; }

  INLINE IntVec multiply(IntVec sum, WordVec w, WordVec x) {
    return OF_BOTH(add_epi32)(sum, OF_BOTH(madd_epi16)(w, x));
  }
  INLINE IntVec add_codes(IntVec sum, WordVec) { return sum; }  // sums are for an offset
  INLINE WordVec broadcast(int32_t unit) { return OF_BOTH(set1_epi32)(unit); }
  INLINE Vec to_floats(IntVec x) { return OF_BOTH(cvtepi32_ps)(x); }
#ifdef __AVX512BW__
  INLINE IntVec nothing() { return _mm512_setzero_si512(); }
  INLINE Vec as_floats(WordVec x) { return _mm512_castsi512_ps(x); }
  INLINE WordVec as_words(Vec x) { return _mm512_castps_si512(x); }
  INLINE WordVec narrow(const Vec x[UNIT]) {
    const __m256i low = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x[0]));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x[1])), 1);
  }
  INLINE WordVec load_codes(const int8_t* p, int64_t) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  INLINE WordVec load_words(const char* p, int64_t) { return _mm512_loadu_si512(p); }
#else
  INLINE IntVec nothing() { return _mm256_setzero_si256(); }
  INLINE Vec as_floats(WordVec x) { return _mm256_castsi256_ps(x); }
  INLINE WordVec as_words(Vec x) { return _mm256_castps_si256(x); }
  INLINE WordVec narrow(const Vec x[UNIT]) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
    return _mm256_permute4x64_epi64(both, 0xd8);
  }
  INLINE WordVec load_codes(const int8_t* p, int64_t) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  INLINE WordVec load_words(const char* p, int64_t) { return _mm256_loadu_si256((const __m256i*)p); }
#endif
  // A row of `size` codes, a multiple of 32, as units.
  INLINE void prepare(const int8_t* codes, int64_t size, int32_t* units) {
    for (int64_t k = 0; k < size; k += CODES) {
      const Vec words = as_floats(load_codes(codes + k, size - k));
      store((float*)units + k / UNIT, words);
    }
  }
};
#undef OF_BOTH

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
