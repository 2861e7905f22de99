// Times independent bf16 dot products against independent float32 FMAs, all in registers.
#include "isa_probe.h"

#include <immintrin.h>
#include <stdint.h>
#include <x86intrin.h>

namespace hf_paged {
namespace {

constexpr int CHAINS = 12;    // more than latency (4 to 8 cycles) x units (1 or 2) of any processor for most of them
constexpr int ROUNDS = 400;   // about 2 microseconds at one instruction a cycle
constexpr int REPEATS = 40;   // an interrupted run is longer, so the shortest counts

struct Fma {
  __m512 a, b;
  __m512 operator()(__m512 sum) const { return _mm512_fmadd_ps(a, b, sum); }
};

struct Bf16Dot {
  __m512bh a, b;
  __m512 operator()(__m512 sum) const { return _mm512_dpbf16_ps(sum, a, b); }
};

// Cycles of CHAINS x ROUNDS instructions.
template <class Step>
uint64_t cycles(const Step& step) {
  __m512 sums[CHAINS];
#pragma GCC unroll 12  // or the array, and with it each sum, would lie in memory
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps((float)i);
  const uint64_t start = __rdtsc();
  for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) {
      sums[i] = step(sums[i]);
      asm volatile("" : "+v"(sums[i]));  // keeps the sum in its register, and the compiler from simplifying
    }
  }
  return __rdtsc() - start;
}

}  // namespace

double bf16_dot_speedup_avx512bf16() {
  const Fma fma{_mm512_set1_ps(1.f), _mm512_set1_ps(1.f)};
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);  // pairs of bf16 ones
  const Bf16Dot dot{(__m512bh)ones, (__m512bh)ones};
  uint64_t shortest_fma = ~0ull, shortest_dot = ~0ull;
  for (int i = 0; i < REPEATS; i++) {
    const uint64_t one = cycles(fma), other = cycles(dot);
    shortest_fma = one < shortest_fma ? one : shortest_fma;
    shortest_dot = other < shortest_dot ? other : shortest_dot;
  }
  return 2.0 * (double)shortest_fma / (double)shortest_dot;  // a dot product does twice the operations
}

}  // namespace hf_paged
