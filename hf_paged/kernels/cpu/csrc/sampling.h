// Choosing tokens: what the kernels are given, a row of scores at a time.
#pragma once
#include <stdint.h>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

struct Scores {
  const void* data;
  DType dtype;
  int64_t stride;  // elements from one row to the next
  int64_t size;    // scores in a row
};

// A row of the settings tensor, as the Python side lays it out.
struct DrawSettings {
  double kind;  // 0: the best token; 1: any token; 2: one of those that top-k, top-p and min-p leave
  double temperature;
  double top_k;  // 0: all
  double top_p;  // 1: all
  double min_p;  // 0: all
};
constexpr double DRAW_BEST = 0, DRAW_ANY = 1, DRAW_TRUNCATED = 2;

// Room for a row, one item per score; only what is used is touched.
struct DrawScratch {
  float* maxima;
  uint64_t* entries;
  uint64_t* spare;
  double* cumulative;
};

struct SamplingKernels {
  // The largest score, NaN if the row holds one, and its first column (0 if there is none).
  void (*best)(const Scores&, int64_t row, float* value, int64_t* column);
  // The same score, and a column drawn by a number in (0, 1); 0 if the largest score is not finite.
  void (*draw)(const Scores&, int64_t row, const DrawSettings&, double uniform, const DrawScratch&, float* value,
               int64_t* column);
  // log(sum(exp(scores))), and how many scores are larger than that of a column. The largest score is finite.
  void (*measure)(const Scores&, int64_t row, int64_t column, float* log_sum, int64_t* num_larger);
  // The k largest scores in order and their columns, equal ones by column; -inf where there are no more.
  void (*largest)(const Scores&, int64_t row, int64_t k, const DrawScratch&, float* values, int64_t* columns);
};

extern const SamplingKernels sampling_avx2, sampling_avx512;

inline const SamplingKernels& sampling_kernels() {
  return current_isa() >= Isa::avx512 ? sampling_avx512 : sampling_avx2;
}

}  // namespace hf_paged
