// RMS norm and layer norm over rows: arguments and the table of kernels.
//
//   sum = x + residual                           (only with a residual; rounded to its dtype, as a module would)
//   rms:        y = sum / sqrt(mean(sum^2) + eps) * (weight_offset + weight)
//   layer_norm: y = (sum - mean(sum)) / sqrt(var(sum) + eps) * (weight_offset + weight) + bias
//
// Rows lie in two levels, so that the heads of a fused query/key/value row can be normed where they are:
//
//   row r of x:   x + (r / inner) * x_outer_stride + (r % inner) * x_stride
//
//   token 0   | q0 | q1 | q2 | k0 | v0 |      q norm: inner = 3 heads, x_stride = size, x_outer_stride = 5 * size
//   token 1   | q0 | q1 | q2 | k0 | v0 |      plain rows: inner = 1 (the default), x_outer_stride = row stride
#pragma once
#include <stdint.h>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

struct NormArgs {
  const void* x = nullptr;
  int64_t x_outer_stride = 0, x_stride = 0;  // strides are in elements everywhere
  DType x_dtype = DType::f32;

  const void* residual = nullptr;  // none; rows of one level (inner must be 1)
  void* sum = nullptr;             // needed with a residual; may be the residual itself, or x where dtypes are equal
  int64_t residual_stride = 0, sum_stride = 0;
  DType residual_dtype = DType::f32;  // of residual and sum

  void* y = nullptr;  // may be x where strides and dtypes are equal
  int64_t y_outer_stride = 0, y_stride = 0;
  DType y_dtype = DType::f32;

  const void* weight = nullptr;  // none
  const void* bias = nullptr;    // none
  DType weight_dtype = DType::f32;  // of weight and bias
  float weight_offset = 0;          // 1 for Gemma's (1 + weight)

  float eps = 0;
  int64_t size = 0;   // numbers in a row
  int64_t inner = 1;  // rows of the second level
};

// Each norms the rows begin ... end - 1 on the calling thread; rows are independent of each other.
struct NormKernels {
  void (*rms)(const NormArgs& args, int64_t begin, int64_t end);
  void (*layer_norm)(const NormArgs& args, int64_t begin, int64_t end);
};

extern const NormKernels norm_avx2, norm_avx512;

inline const NormKernels& norm_kernels() { return current_isa() >= Isa::avx512 ? norm_avx512 : norm_avx2; }

}  // namespace hf_paged
