// From torch's tensors to blocks of K/V: numbers, or codes and their scales.
#pragma once
#include "op.h"

namespace hf_paged {

inline DType cache_dtype_of(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case torch::headeronly::ScalarType::Char: return DType::q8;
    case torch::headeronly::ScalarType::Float8_e4m3fn: return DType::e4m3;
    case torch::headeronly::ScalarType::Float8_e5m2: return DType::e5m2;
    default: return dtype_of(cache);
  }
}

// Scales of a cache [num_blocks, num_kv_heads, block_size, head_dim]; null if it has none and needs none.
inline f16* scales_of(const Tensor& cache, const Tensor* scales, const char* op) {
  STD_TORCH_CHECK(is_quantized(cache_dtype_of(cache)) == (scales != nullptr), op,
                  ": quantized K/V blocks come with scales, others without");
  if (!scales) return nullptr;
  STD_TORCH_CHECK(scales->scalar_type() == torch::headeronly::ScalarType::Half && scales->is_contiguous() &&
                      scales->dim() == 3 && scales->size(0) == cache.size(0) && scales->size(1) == cache.size(1) &&
                      scales->size(2) == cache.size(2),
                  op, ": scales of K/V blocks must be contiguous float16, [num_blocks, num_kv_heads, block_size]");
  return (f16*)scales->mutable_data_ptr();
}

}  // namespace hf_paged
