// Four neighbouring k in a lane: vpdpbusd multiplies unsigned with signed bytes, so that 128 is added to the weights'
// codes, and 128 times the sum of the tokens' codes is taken off again.
#include "vec_avx512.h"

namespace hf_paged {
namespace avx512 {
namespace {

typedef __m512i IntVec;
typedef IntVec WordVec;

struct Ints {
  static constexpr int UNIT = 4;
  static constexpr int CODES = 64;
  static constexpr float OFFSET = 128;
  static constexpr int rows_of(int vectors) { return vectors == 4 ? 6 : 8; }

  INLINE IntVec nothing() { return _mm512_setzero_si512(); }
  INLINE IntVec multiply(IntVec sum, WordVec w, WordVec x) { return _mm512_dpbusd_epi32(sum, w, x); }
  INLINE IntVec add_codes(IntVec sum, WordVec x) { return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), x); }
  INLINE WordVec broadcast(int32_t unit) { return _mm512_set1_epi32(unit); }
  INLINE Vec to_floats(IntVec x) { return _mm512_cvtepi32_ps(x); }
  INLINE Vec as_floats(WordVec x) { return _mm512_castsi512_ps(x); }
  INLINE WordVec as_words(Vec x) { return _mm512_castps_si512(x); }
  INLINE WordVec narrow(const Vec x[UNIT]) {
    __m512i words = _mm512_castsi128_si512(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x[0])));
    words = _mm512_inserti32x4(words, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x[1])), 1);
    words = _mm512_inserti32x4(words, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x[2])), 2);
    return _mm512_inserti32x4(words, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x[3])), 3);
  }
  // Rows are multiples of 32 codes: the last vector may be half of one, which no product may see more of.
  INLINE __mmask64 first_codes(int64_t left) { return left >= 64 ? ~0ull : (1ull << left) - 1; }
  INLINE WordVec load_codes(const int8_t* p, int64_t left) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(first_codes(left), p), _mm512_set1_epi8((char)0x80));
  }
  INLINE WordVec load_words(const char* p, int64_t left) { return _mm512_maskz_loadu_epi8(first_codes(left), p); }
  INLINE void prepare(const int8_t* codes, int64_t size, int32_t* units) {
    for (int64_t k = 0; k < size; k += CODES)
      _mm512_mask_storeu_epi8((char*)units + k, first_codes(size - k), load_codes(codes + k, size - k));
  }
};

}  // namespace
}  // namespace avx512
}  // namespace hf_paged

#include "linear_w8a8.h"

namespace hf_paged {

extern const LinearKernels linear_w8a8_avx512vnni = avx512::w8a8_table(64);

}  // namespace hf_paged
