// The loop that every burst shares, compiled for one instruction set.
#pragma once

namespace hf_paged {
namespace {

constexpr int PEAK_CHAINS = 12;    // latency (4 to 6 cycles) x units (1 or 2) of almost any processor
constexpr int PEAK_ROUNDS = 1000;  // some microseconds

// `step` is applied to each of independent sums, again and again.
template <class Vector, class Step>
static inline __attribute__((always_inline)) void peak_loop(Vector zero, const Step& step) {
  Vector sums[PEAK_CHAINS];
#pragma GCC unroll 12  // an array that is never indexed by a variable lives in registers
  for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = zero;
  for (int round = 0; round < PEAK_ROUNDS; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < PEAK_CHAINS; i++) {
      sums[i] = step(sums[i]);
      __asm__ volatile("" : "+v"(sums[i]));  // keeps the sum in its register, and the compiler from simplifying
    }
  }
}

}  // namespace
}  // namespace hf_paged
