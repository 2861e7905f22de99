// Element types of tensors, and what the kernels call them.
#pragma once
#include <stdint.h>

namespace hf_paged {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace hf_paged
