// Attention over a bfloat16 cache by the bfloat16 dot product, for processors where it is faster than multiply-add.
// Queries, and with many rows the softmax weights too, are rounded to bfloat16.
#include "vec_avx512.h"

#include "attention_few_rows.h"
#include "attention_many_rows.h"

namespace hf_paged {
namespace avx512 {
namespace {

// Elements are pairs of bfloat16 numbers.
struct DotMath {
  typedef bf16 Cache;
  static constexpr int PER_ELEMENT = 2;

  INLINE __m512bh pairs(Vec x) { return (__m512bh)_mm512_castps_si512(x); }
  INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, pairs(a), pairs(b)); }

  INLINE __mmask32 first_of_32(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }
  INLINE Vec elements(const bf16* p) { return _mm512_loadu_ps(p); }
  INLINE Vec elements(const bf16* p, int n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first_of_32(n), p));
  }

  INLINE void pack_query(float* out, const void* query, DType dtype, int64_t at, int size) {
    bf16* pairs = (bf16*)out;
    for (int d = 0; d < size; d += 2 * W) {
      if (dtype == DType::bf16) {
        _mm512_storeu_ps(pairs + d, elements((const bf16*)query + at + d, size - d));
      } else {
        const float* from = (const float*)query + at + d;
        store(pairs + d, load(from, size - d));
        store(pairs + d + W, size - d > W ? load(from + W, size - d - W) : zero());
      }
    }
  }

  INLINE void store_weights(float* row, int j, Vec x, Vec next) {
    _mm512_storeu_si512(row + j / 2 * W, (__m512i)_mm512_cvtne2ps_pbh(next, x));
  }

  INLINE void pack_values(float* out, const bf16* const* values, int size) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < size; d += 2 * W) {
      __m512i row[2];
      for (int i = 0; i < 2; i++)
        row[i] = values[i] ? _mm512_maskz_loadu_epi16(first_of_32(size - d), values[i] + d) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(row[0], low, row[1]));
      if (d + W < size) _mm512_storeu_si512(out + d + W, _mm512_permutex2var_epi16(row[0], high, row[1]));
    }
  }
};

int64_t scratch_size(const AttentionArgs& args) {
  const int64_t few = FewRowsScratch(args, nullptr).size();
  const int64_t many = ManyRowsScratch::of<DotMath>(args, nullptr).size(nullptr);
  return few > many ? few : many;
}

}  // namespace
}  // namespace avx512

extern const AttentionKernels attention_avx512bf16 = {avx512::few_rows<avx512::DotMath>,
                                                      avx512::many_rows<avx512::DotMath>, avx512::merge,
                                                      avx512::scratch_size};

}  // namespace hf_paged
