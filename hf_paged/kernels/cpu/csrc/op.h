// What every operator file shares: torch's stable ABI, dtypes, checks and the thread pool.
//
// Operator files (op_*.cpp) see torch and know nothing of instruction sets; kernel files (*_avx2.cpp, ...) are compiled
// for one instruction set and know nothing of torch.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "dtype.h"
#include "isa.h"
#include "team.h"

namespace hf_paged {

using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Float: return DType::f32;
    case torch::headeronly::ScalarType::BFloat16: return DType::bf16;
    case torch::headeronly::ScalarType::Half: return DType::f16;
    default: STD_TORCH_CHECK(false, "hf_paged: only float32, bfloat16 and float16 are implemented"); return DType::f32;
  }
}

}  // namespace hf_paged
