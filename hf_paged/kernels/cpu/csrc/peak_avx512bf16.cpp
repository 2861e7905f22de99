// Peak of the bf16 dot product, which multiplies and adds 32 pairs at once.
#include <immintrin.h>

#include "peak.h"
#include "peak_loop.h"

namespace hf_paged {
namespace {

void dot() {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);  // pairs of bf16 ones
  peak_loop(_mm512_setzero_ps(), [=](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
}

}  // namespace

const PeakBurst peak_bf16_dot_avx512bf16 = {2 * 32 * PEAK_CHAINS * PEAK_ROUNDS, dot};

}  // namespace hf_paged
