// From torch's tensors to the parts of a linear.
#pragma once
#include <initializer_list>

#include "linear.h"
#include "op.h"

namespace hf_paged {

// What a weight's last dimension says of its rows: k numbers, or the bytes of a packed row.
inline void set_row_format(LinearPart& part, const Tensor& weight, int64_t k) {
  using torch::headeronly::ScalarType;
  const ScalarType type = weight.scalar_type();
  const int64_t padded = (k + 31) / 32 * 32, size = weight.size(weight.dim() - 1) * (type == ScalarType::Short ? 2 : 1);
  if (type != ScalarType::Byte && type != ScalarType::Char && type != ScalarType::Short) {
    part.dtype = dtype_of(weight);
    STD_TORCH_CHECK(size == k, "linear: weights must have x's k");
    return;
  }
  part.dtype = type == ScalarType::Short ? DType::w8a8 : type == ScalarType::Char ? DType::e4m3 : size > padded ? DType::q8 : DType::q4;
  const int64_t rest = size - (part.dtype == DType::q4 ? padded / 2 : padded), num_groups = rest / 8;
  STD_TORCH_CHECK(k > 0 && rest > 0 && rest % 8 == 0 && (num_groups == 1 || (k % num_groups == 0 && k / num_groups % 32 == 0)),
                  "linear: a packed row of ", size, " bytes does not fit x's k, ", k);
  STD_TORCH_CHECK(part.dtype != DType::w8a8 || num_groups == 1, "linear: int8 rows for int8 activations have one scale");
  part.group = num_groups == 1 ? padded : k / num_groups;
}

// A weight [rows, k] or, for the parts of an interleaved projection, [blocks, rows, k]; the last stride is 1. Packed
// rows are of bytes and have another last dimension.
inline LinearPart linear_part(const Tensor& weight, const Tensor* bias, int64_t k) {
  LinearPart part;
  const int64_t dims = weight.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, "linear: a weight has 2 dimensions, or 3 if its rows come in blocks");
  STD_TORCH_CHECK(weight.stride(dims - 1) == 1 || weight.size(dims - 1) == 1, "linear: rows of a weight must be contiguous");
  set_row_format(part, weight, k);
  part.weight = weight.const_data_ptr();
  part.row_stride = weight.stride(dims - 2);
  part.num_rows = weight.size(dims - 2);
  if (dims == 3) {
    part.rows_per_block = weight.size(1);
    part.block_stride = weight.stride(0);
    part.num_rows *= weight.size(0);
  }
  if (part.dtype == DType::w8a8) {  // rows of int16, counted in bytes here
    part.row_stride *= 2;
    part.block_stride *= 2;
  }
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == dims - 1 && bias->numel() == part.num_rows, "linear: a bias has one number per row");
    part.bias_dtype = dtype_of(*bias);
    STD_TORCH_CHECK(is_packed(part.dtype) || part.bias_dtype == part.dtype, "linear: a bias has its weight's dtype");
    STD_TORCH_CHECK(bias->stride(dims - 2) == 1 || bias->size(dims - 2) == 1, "linear: a bias must be contiguous");
    part.bias = bias->const_data_ptr();
    if (dims == 3) part.bias_block_stride = bias->stride(0);
  }
  return part;
}

// Parts of one product have their activations quantized all together, or not at all: the rows are those of q8.
inline void agree_on_activations(std::initializer_list<LinearPart*> parts) {
  bool all = true;
  for (const LinearPart* part : parts) all = all && part->dtype == DType::w8a8;
  for (LinearPart* part : parts)
    if (!all && part->dtype == DType::w8a8) part->dtype = DType::q8;
}

}  // namespace hf_paged
