// How many operations a processor does at most: the yardstick of kernels that are bound by arithmetic.
//
// Each instruction set has a burst: a fixed number of independent multiply-accumulates, all in registers. op_peak.cpp
// times bursts on all threads.
#pragma once
#include <stdint.h>

#include "isa.h"

namespace hf_paged {

struct PeakBurst {
  int64_t operations;  // of one run; a multiplication and an addition count as two
  void (*run)();       // a few microseconds
};

extern const PeakBurst peak_fma_avx2, peak_fma_avx512, peak_bf16_dot_avx512bf16, peak_amx;

}  // namespace hf_paged
