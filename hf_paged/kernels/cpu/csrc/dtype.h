// Element types of tensors, and what the kernels call them.
#pragma once
#include <stdint.h>

namespace hf_paged {

// From q4 on they are codes: of weights in packed rows, as kernels/packed_rows.py describes them (q4, q8, e4m3, w8a8), or
// of K/V, as kernels/quantized_blocks.py does (q8, e4m3, e5m2).
enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, q4 = 3, q8 = 4, e4m3 = 5, w8a8 = 6, e5m2 = 7 };
constexpr int NUM_WEIGHT_DTYPES = 7;

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
// Bytes of codes.
struct q4 { uint8_t bits; };
struct q8 { int8_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

static inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype <= DType::f16 ? 2 : 1; }
static inline bool is_packed(DType dtype) { return dtype >= DType::q4; }
static inline bool is_quantized(DType cache_dtype) { return cache_dtype >= DType::q8; }

}  // namespace hf_paged
