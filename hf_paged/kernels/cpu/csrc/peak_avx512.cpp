// Peak of float32 FMA on 512-bit registers.
#include <immintrin.h>

#include "peak.h"
#include "peak_loop.h"

namespace hf_paged {
namespace {

void fma() {
  const __m512 ones = _mm512_set1_ps(1.f);
  peak_loop(_mm512_setzero_ps(), [=](__m512 sum) { return _mm512_fmadd_ps(ones, ones, sum); });
}

}  // namespace

const PeakBurst peak_fma_avx512 = {2 * 16 * PEAK_CHAINS * PEAK_ROUNDS, fma};

}  // namespace hf_paged
