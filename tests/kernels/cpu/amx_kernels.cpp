// Plain C entry points to the kernels for the matrix unit, for test_amx.py. Compiled together with csrc/*_amx.cpp into
// a library of its own, once with the instructions and once with HF_PAGED_EMULATE_AMX.
#include "attention_items.h"
#include "linear.h"
#include "tiles.h"

namespace hf_paged {

// What the kernels hand over to other tables; no test gets there.
bool prefers_bf16_dot() { return false; }
static int64_t no_scratch(const AttentionArgs&) { return 0; }
extern const AttentionKernels attention_avx512 = {nullptr, nullptr, nullptr, no_scratch};
extern const AttentionKernels attention_avx512bf16 = {nullptr, nullptr, nullptr, no_scratch};
extern const LinearKernels linear_avx512bf16 = {};
extern const AttentionKernels attention_amx;

}  // namespace hf_paged

using namespace hf_paged;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void multiply_tiles(const void* a, const void* b, float* c, int configured) {
  if (configured) tiles::configure();
  tiles::load<0>(c, 64);
  tiles::load<1>(a, 64);
  tiles::load<2>(b, 64);
  tiles::multiply<0, 1, 2>();
  tiles::store<0>(c, 64);
  if (configured) tiles::release();
}

EXPORT int64_t columns_of_item() { return COLUMNS; }

EXPORT void linear_many(const void* const* rows, int num_rows, int64_t row_stride, int64_t k, const void* x,
                        int num_tokens, float* out, void* scratch) {
  LinearTile tile{};
  tile.rows = rows;
  tile.num_rows = num_rows;
  tile.row_stride = row_stride;
  tile.k = k;
  tile.x = x;
  tile.num_tokens = num_tokens;
  tile.out = out;
  tile.scratch = scratch;
  linear_amx.many[(int)DType::bf16](tile);
}

struct AttentionCall {
  const void *query, *key_cache, *value_cache;
  void* output;
  float *lse, *partials;
  const float *sinks, *alibi_slopes;
  const int32_t *tokens, *positions, *block_table, *first_parts;
  int64_t num_query_heads, num_kv_heads, key_dim, value_dim, block_size, query_is_float, window, num_tokens, first_head,
      num_heads, kv_head, first_key, end_key, part;
  float scale, softcap;
};

static AttentionArgs arguments(const AttentionCall& call) {
  AttentionArgs args{};
  args.query = call.query;
  args.query_stride = call.num_query_heads * call.key_dim;
  args.query_dtype = args.output_dtype = call.query_is_float ? DType::f32 : DType::bf16;
  args.output = call.output;
  args.output_stride = call.num_query_heads * call.value_dim;
  args.lse = call.lse;
  args.key_cache = call.key_cache;
  args.value_cache = call.value_cache;
  args.cache_dtype = DType::bf16;
  args.num_query_heads = call.num_query_heads;
  args.num_kv_heads = call.num_kv_heads;
  args.key_dim = call.key_dim;
  args.value_dim = call.value_dim;
  args.block_size = call.block_size;
  args.scale = call.scale;
  args.window = call.window;
  args.softcap = call.softcap;
  args.sinks = call.sinks;
  args.alibi_slopes = call.alibi_slopes;
  return args;
}

EXPORT int64_t attention_scratch(const AttentionCall* call) { return attention_amx.scratch_size(arguments(*call)); }

EXPORT void attention_many_rows(const AttentionCall* call, float* scratch) {
  AttentionItem item{};
  item.tokens = call->tokens;
  item.positions = call->positions;
  item.block_table = call->block_table;
  item.num_tokens = (int32_t)call->num_tokens;
  item.first_head = (int32_t)call->first_head;
  item.num_heads = (int32_t)call->num_heads;
  item.kv_head = (int32_t)call->kv_head;
  item.first_key = (int32_t)call->first_key;
  item.end_key = (int32_t)call->end_key;
  item.partials = call->partials;
  item.first_parts = call->first_parts;
  item.part = (int32_t)call->part;
  attention_amx.many_rows(arguments(*call), item, scratch);
}

EXPORT void attention_merge(const AttentionCall* call, int64_t num_parts, int64_t token) {
  attention_amx.merge(arguments(*call), call->partials, call->first_parts[token], num_parts, token, call->first_head,
                      call->num_heads);
}
