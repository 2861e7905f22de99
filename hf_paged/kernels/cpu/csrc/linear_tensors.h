// From torch's tensors to the parts of a linear.
#pragma once
#include "linear.h"
#include "op.h"

namespace hf_paged {

// A weight [rows, k] or, for the parts of an interleaved projection, [blocks, rows, k]; the last stride is 1.
inline LinearPart linear_part(const Tensor& weight, const Tensor* bias) {
  LinearPart part;
  const int64_t dims = weight.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, "linear: a weight has 2 dimensions, or 3 if its rows come in blocks");
  STD_TORCH_CHECK(weight.stride(dims - 1) == 1 || weight.size(dims - 1) == 1, "linear: rows of a weight must be contiguous");
  part.weight = weight.const_data_ptr();
  part.row_stride = weight.stride(dims - 2);
  part.num_rows = weight.size(dims - 2);
  if (dims == 3) {
    part.rows_per_block = weight.size(1);
    part.block_stride = weight.stride(0);
    part.num_rows *= weight.size(0);
  }
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == dims - 1 && bias->numel() == part.num_rows, "linear: a bias has one number per row");
    STD_TORCH_CHECK(bias->scalar_type() == weight.scalar_type(), "linear: a bias has its weight's dtype");
    STD_TORCH_CHECK(bias->stride(dims - 2) == 1 || bias->size(dims - 2) == 1, "linear: a bias must be contiguous");
    part.bias = bias->const_data_ptr();
    if (dims == 3) part.bias_block_stride = bias->stride(0);
  }
  return part;
}

}  // namespace hf_paged
