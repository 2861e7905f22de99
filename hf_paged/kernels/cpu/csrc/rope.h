// Rotary position embedding fused with the store of K/V into their blocks: arguments and the table of kernels.
//
// Every rotary embedding turns pairs of numbers of a head by an angle: (a, b) -> (a cos - b sin, b cos + a sin).
// The layouts in use differ in four things:
//
//   pairs          half:                 pair i = (x[i], x[i + n/2])       Llama, GPT-NeoX, Phi, ... (`rotate_half`)
//                  interleaved:          pair i = (x[2i], x[2i + 1])       GPT-J, Cohere, GLM, Llama4, ...
//                  interleaved_to_half:  read as the second, written as the first     DeepSeek-V3's `interleave`
//   which part     x[rotary_begin ... rotary_begin + rotary_dim - 1] rotates, the rest is copied
//   cos, sin       those of pair i stand at cos[i * cos_step]: 1 for tables of n/2 numbers or of two equal halves,
//                  2 where each number is repeated (Cohere) or cos and sin alternate (complex numbers: sin = cos + 1)
//   sin_sign       -1 turns the other way (nanochat)
//
// Caches are [num_blocks, num_kv_heads, block_size, head_dim]; a slot is block_id * block_size + offset. Quantized ones
// hold codes, and have scales [num_blocks, num_kv_heads, block_size].
#pragma once
#include <stdint.h>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

enum class RopePairs : int32_t { half = 0, interleaved = 1, interleaved_to_half = 2 };

constexpr int64_t max_rotary_dim = 1024, max_quantized_dim = 1024;

// Heads of one tensor: head h of token t starts at data + t * token_stride + h * head_stride (elements).
struct RopeHeads {
  const void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

struct RopeOutput {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

struct RopeStoreArgs {
  RopeHeads query, key, value;  // data null: none
  DType dtype = DType::f32;     // of the three
  RopeOutput query_out, key_out;  // data null: none; may be query and key themselves where the dtypes are equal
  DType out_dtype = DType::f32;   // of the two

  const void* cos = nullptr;  // null: no rotation, query and key are copied
  const void* sin = nullptr;
  int64_t cos_stride = 0;  // from token to token, of both; 0 if all tokens share them
  int64_t cos_step = 1;
  DType cos_dtype = DType::f32;
  RopePairs pairs = RopePairs::half;
  int64_t rotary_begin = 0, rotary_dim = 0;  // rotary_dim is even and at most max_rotary_dim
  float sin_sign = 1;

  void* key_cache = nullptr;    // null: keys are not stored
  void* value_cache = nullptr;  // null: values are not stored
  int64_t key_block_stride = 0, value_block_stride = 0;  // from block to block; a block itself is contiguous
  DType cache_dtype = DType::f32;
  f16* key_scales = nullptr;    // both or neither; heads are at most max_quantized_dim then
  f16* value_scales = nullptr;
  const int64_t* slot_mapping = nullptr;  // [tokens]; negative: the token is padding and is not stored

  int64_t num_query_heads = 0, num_kv_heads = 0, key_dim = 0, value_dim = 0, block_size = 0;
};

struct RopeKernels {
  // Rotates the tokens begin ... end - 1 and stores their K/V, on the calling thread; tokens are independent.
  void (*rope_store)(const RopeStoreArgs& args, int64_t begin, int64_t end);
};

extern const RopeKernels rope_avx2, rope_avx512;

inline const RopeKernels& rope_kernels() { return current_isa() >= Isa::avx512 ? rope_avx512 : rope_avx2; }

}  // namespace hf_paged
