// Peak of float32 FMA on 256-bit registers.
#include <immintrin.h>

#include "peak.h"
#include "peak_loop.h"

namespace hf_paged {
namespace {

void fma() {
  const __m256 ones = _mm256_set1_ps(1.f);
  peak_loop(_mm256_setzero_ps(), [=](__m256 sum) { return _mm256_fmadd_ps(ones, ones, sum); });
}

}  // namespace

const PeakBurst peak_fma_avx2 = {2 * 8 * PEAK_CHAINS * PEAK_ROUNDS, fma};

}  // namespace hf_paged
