// What every kernel for many tokens does with its sums; include it after vec_*.h.
#pragma once
#include "linear.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// sums [column][token] -> out [token][column]
INLINE void turn(const float* sums, int num_columns, int num_tokens, float* out) {
  for (int n = 0; n < num_columns; n += W)
    for (int m = 0; m < num_tokens; m += W) {
      Vec r[W];
      for (int i = 0; i < W; i++) r[i] = load(sums + (n + i) * MAX_WIDTH + m);
      transpose(r);
      for (int i = 0; i < W; i++) store(out + (m + i) * COLUMNS + n, r[i]);
    }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
