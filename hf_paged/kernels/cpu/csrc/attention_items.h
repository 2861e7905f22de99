// Paged attention: what a call and a piece of work are given, and the table of kernels. Kernel files include this; it
// includes no C++ library (see vec_avx512.h), and what it defines has internal linkage.
#pragma once
#include <stdint.h>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

struct AttentionArgs {
  const void* query;      // token t, head h, dimension d at [t * query_stride + h * key_dim + d]
  int64_t query_stride;
  DType query_dtype;      // float32 or the cache's; any of numbers if that is quantized
  void* output;           // token t, head h, dimension d at [t * output_stride + h * value_dim + d]
  int64_t output_stride;
  DType output_dtype;     // as query_dtype
  float* lse;             // [tokens, num_query_heads], or null
  const void* key_cache;  // [num_blocks, num_kv_heads, block_size, key_dim], contiguous
  const void* value_cache;  // [num_blocks, num_kv_heads, block_size, value_dim], contiguous
  DType cache_dtype;
  const f16* key_scales;    // [num_blocks, num_kv_heads, block_size] if the caches are quantized, else null
  const f16* value_scales;
  int64_t num_blocks;
  const int32_t* block_tables;  // [num_requests, max_blocks]
  int64_t block_tables_stride, max_blocks;
  const int32_t* cu_seqlens_q;  // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests], the call's tokens included
  int64_t num_requests, num_query_heads, num_kv_heads, key_dim, value_dim, block_size;
  float scale;
  int64_t window;             // a token sees the last `window` positions; <= 0: all
  float softcap;              // 0: none
  const float* sinks;         // [num_query_heads], or null
  const float* alibi_slopes;  // [num_query_heads], or null
};

// One piece of work. Its rows are (token, head) pairs, heads innermost: row r is token tokens[r / num_heads], query
// head first_head + r % num_heads. All rows read the keys of `kv_head` at the positions first_key ... end_key - 1;
// a row whose token lies before some of them, or beyond the window of some, must not see those.
struct AttentionItem {
  const int32_t* tokens;
  const int32_t* positions;    // of every token of the call in its own context, indexed by token
  const int32_t* block_table;  // of the request, or of one of those that share these keys
  int32_t num_tokens, first_head, num_heads, kv_head, first_key, end_key;
  // Null: the rows' results go to the output. Otherwise the partial result of row r goes to
  // partials + (first_parts[token] + part) * num_query_heads + head, each of partial_size() floats:
  // | value_dim sums of weight * value | highest score, base 2 | sum of the weights |
  float* partials;
  const int32_t* first_parts;  // indexed by token
  int32_t part;
};

static inline int64_t partial_size(const AttentionArgs& args) { return args.value_dim + 2; }

// Most rows of a piece; and up to how many of them the kernel for few rows is used.
constexpr int MANY_ROWS = 96, FEW_ROWS = 8;

struct AttentionKernels {
  // At most FEW_ROWS rows, all of which see all of the item's keys; reads the cache in place.
  void (*few_rows)(const AttentionArgs&, const AttentionItem&, float* scratch);
  // At most MANY_ROWS rows; copies keys and values, a chunk at a time, to where they make a matrix product.
  void (*many_rows)(const AttentionArgs&, const AttentionItem&, float* scratch);
  // Combines the partial results of one token and the query heads first_head ... first_head + num_heads - 1.
  void (*merge)(const AttentionArgs&, const float* partials, int64_t first_part, int64_t num_parts, int64_t token,
                int64_t first_head, int64_t num_heads);
  // Floats of 64-byte aligned memory that a kernel needs.
  int64_t (*scratch_size)(const AttentionArgs&);
};

extern const AttentionKernels attention_avx2, attention_avx512, attention_avx512bf16, attention_amx;
extern const AttentionKernels attention_codes_avx2, attention_codes_avx512;

// The table for this machine and a cache of the given type.
inline const AttentionKernels& attention_kernels(DType cache_dtype) {
  const Isa isa = current_isa();
  if (is_quantized(cache_dtype)) return isa < Isa::avx512 ? attention_codes_avx2 : attention_codes_avx512;
  if (isa < Isa::avx512) return attention_avx2;
  if (cache_dtype != DType::bf16) return attention_avx512;
  if (isa == Isa::amx) return attention_amx;
  return prefers_bf16_dot() ? attention_avx512bf16 : attention_avx512;
}

}  // namespace hf_paged
