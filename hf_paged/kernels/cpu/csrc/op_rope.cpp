// Operators: rope (rotates heads) and rope_store (rotates query and key, and writes K/V into their slots).
#include "rope.h"

#include "kv_tensors.h"

namespace hf_paged {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t numbers_per_item = 16384;  // work that is worth another thread

RopeHeads heads_of(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 3 && (x.size(2) <= 1 || x.stride(2) == 1), "hf_paged rope: ", name,
                  " must be [tokens, heads, head_dim] with contiguous heads");
  return {x.const_data_ptr(), x.stride(0), x.stride(1)};
}

RopeOutput contiguous_output(const Tensor& y) {
  return {y.mutable_data_ptr(), y.size(1) * y.size(2), y.size(2)};
}

struct Layout {
  int64_t pairs, rotary_begin, rotary_dim, cos_step;
  double sin_sign;
};

void set_layout(RopeStoreArgs& args, const Layout& layout) {
  STD_TORCH_CHECK(layout.pairs >= 0 && layout.pairs <= 2, "hf_paged rope: unknown pairs ", layout.pairs);
  STD_TORCH_CHECK(layout.rotary_dim >= 0 && layout.rotary_dim % 2 == 0 && layout.rotary_dim <= max_rotary_dim,
                  "hf_paged rope: rotary_dim must be even and at most ", max_rotary_dim, ", not ", layout.rotary_dim);
  STD_TORCH_CHECK(layout.rotary_begin >= 0 && layout.rotary_begin <= args.key_dim - layout.rotary_dim,
                  "hf_paged rope: rotary_begin + rotary_dim exceeds the head_dim of ", args.key_dim);
  STD_TORCH_CHECK(layout.cos_step == 1 || layout.cos_step == 2, "hf_paged rope: cos_step must be 1 or 2");
  args.pairs = (RopePairs)layout.pairs;
  args.rotary_begin = layout.rotary_begin;
  args.rotary_dim = layout.rotary_dim;
  args.cos_step = layout.cos_step;
  args.sin_sign = (float)layout.sin_sign;
}

// Tables are [tokens, n] (or [1, n] for all tokens); the numbers of pair i are at i * cos_step * stride(1).
void set_angles(RopeStoreArgs& args, const OptionalTensor& cos, const OptionalTensor& sin, int64_t tokens) {
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "hf_paged rope: give both of cos and sin, or neither");
  if (!cos) return;
  STD_TORCH_CHECK(cos->scalar_type() == sin->scalar_type(), "hf_paged rope: cos and sin must have the same dtype");
  for (const Tensor* table : {&*cos, &*sin}) {
    STD_TORCH_CHECK(table->dim() == 2 && (table->size(0) == tokens || table->size(0) == 1),
                    "hf_paged rope: cos and sin must be [tokens, n] or [1, n]");
    STD_TORCH_CHECK(args.rotary_dim == 0 || (args.rotary_dim / 2 - 1) * args.cos_step < table->size(1),
                    "hf_paged rope: cos and sin have ", table->size(1), " numbers, too few for a rotary_dim of ",
                    args.rotary_dim);
    STD_TORCH_CHECK(table->size(0) == cos->size(0) && table->stride(0) == cos->stride(0) &&
                        table->stride(1) == cos->stride(1),
                    "hf_paged rope: cos and sin must have the same rows and strides");
  }
  args.cos = cos->const_data_ptr();
  args.sin = sin->const_data_ptr();
  args.cos_stride = cos->size(0) == tokens ? cos->stride(0) : 0;
  args.cos_step *= cos->stride(1);
  args.cos_dtype = dtype_of(*cos);
}

void check_cache(const Tensor& cache, int64_t heads, int64_t dim, const char* name) {
  STD_TORCH_CHECK(cache.dim() == 4 && cache.size(1) == heads && cache.size(3) == dim, "hf_paged rope: ", name,
                  " must be [num_blocks, ", heads, ", block_size, ", dim, "]");
  STD_TORCH_CHECK(cache.stride(3) == 1 && cache.stride(2) == dim && cache.stride(1) == cache.size(2) * dim,
                  "hf_paged rope: each block of ", name, " must be contiguous");
}

void set_scales(RopeStoreArgs& args, const Tensor& key_cache, const Tensor& value_cache,
                const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  args.key_scales = scales_of(key_cache, key_scales ? &*key_scales : nullptr, "hf_paged rope");
  args.value_scales = scales_of(value_cache, value_scales ? &*value_scales : nullptr, "hf_paged rope");
  STD_TORCH_CHECK(!key_scales || (args.key_dim <= max_quantized_dim && args.value_dim <= max_quantized_dim),
                  "hf_paged rope: heads of quantized K/V are at most ", max_quantized_dim);
}

void set_caches(RopeStoreArgs& args, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping) {
  check_cache(key_cache, args.num_kv_heads, args.key_dim, "key_cache");
  check_cache(value_cache, args.num_kv_heads, args.value_dim, "value_cache");
  STD_TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type() && key_cache.size(0) == value_cache.size(0) &&
                      key_cache.size(2) == value_cache.size(2),
                  "hf_paged rope: key_cache and value_cache must have the same dtype and blocks");
  args.key_cache = key_cache.mutable_data_ptr();
  args.value_cache = value_cache.mutable_data_ptr();
  args.key_block_stride = key_cache.stride(0);
  args.value_block_stride = value_cache.stride(0);
  args.cache_dtype = cache_dtype_of(key_cache);
  args.block_size = key_cache.size(2);
  args.slot_mapping = (const int64_t*)slot_mapping.const_data_ptr();
}

void check_slots(const Tensor& slots, int64_t tokens, int64_t num_slots) {
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == tokens && slots.is_contiguous() &&
                      slots.scalar_type() == torch::headeronly::ScalarType::Long,
                  "hf_paged rope: slot_mapping must be contiguous int64 [", tokens, "]");
  const int64_t* slot = (const int64_t*)slots.const_data_ptr();
  for (int64_t i = 0; i < tokens; i++) {
    STD_TORCH_CHECK(slot[i] < num_slots, "hf_paged rope: slot ", slot[i], " of token ", i, " is not one of the ",
                    num_slots, " slots of the cache");
  }
}

void run(const RopeStoreArgs& args, int64_t tokens) {
  const int64_t numbers = args.num_query_heads * args.key_dim + args.num_kv_heads * (args.key_dim + args.value_dim);
  if (tokens == 0 || numbers == 0) return;
  const int64_t per_item = numbers >= numbers_per_item ? 1 : numbers_per_item / numbers;
  const auto kernel = rope_kernels().rope_store;
  Team::loop((tokens + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t begin = item * per_item, end = begin + per_item;
    kernel(args, begin, end < tokens ? end : tokens);
  });
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t pairs, int64_t rotary_begin,
            int64_t rotary_dim, int64_t cos_step, double sin_sign) {
  RopeStoreArgs args;
  args.query = heads_of(x, "x");
  args.dtype = args.out_dtype = dtype_of(x);
  args.num_query_heads = x.size(1);
  args.key_dim = x.size(2);
  set_layout(args, {pairs, rotary_begin, rotary_dim, cos_step, sin_sign});
  set_angles(args, cos, sin, x.size(0));
  Tensor y = torch::stable::new_empty(x, x.sizes());
  args.query_out = contiguous_output(y);
  run(args, x.size(0));
  return y;
}

Tensor rope_store(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cos,
                  const OptionalTensor& sin, Tensor key_cache, Tensor value_cache, OptionalTensor key_scales,
                  OptionalTensor value_scales, const Tensor& slot_mapping, int64_t pairs, int64_t rotary_begin,
                  int64_t rotary_dim, int64_t cos_step, double sin_sign) {
  const int64_t tokens = query.size(0);
  RopeStoreArgs args;
  args.query = heads_of(query, "query");
  args.key = heads_of(key, "key");
  args.value = heads_of(value, "value");
  STD_TORCH_CHECK(key.size(0) == tokens && value.size(0) == tokens && key.size(1) == value.size(1) &&
                      key.size(2) == query.size(2),
                  "hf_paged rope: query, key and value differ in tokens, heads or head_dim");
  STD_TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
                  "hf_paged rope: query, key and value must have the same dtype");
  args.dtype = args.out_dtype = dtype_of(query);
  args.num_query_heads = query.size(1);
  args.num_kv_heads = key.size(1);
  args.key_dim = key.size(2);
  args.value_dim = value.size(2);
  set_layout(args, {pairs, rotary_begin, rotary_dim, cos_step, sin_sign});
  set_angles(args, cos, sin, tokens);
  set_caches(args, key_cache, value_cache, slot_mapping);
  set_scales(args, key_cache, value_cache, key_scales, value_scales);
  check_slots(slot_mapping, tokens, key_cache.size(0) * key_cache.size(2));
  Tensor query_out = torch::stable::new_empty(query, query.sizes());
  args.query_out = contiguous_output(query_out);
  run(args, tokens);
  return query_out;
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("rope(Tensor x, Tensor cos, Tensor sin, int pairs, int rotary_begin, int rotary_dim, int cos_step, "
        "float sin_sign) -> Tensor");
  m.def("rope_store(Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor slot_mapping, int pairs, "
        "int rotary_begin, int rotary_dim, int cos_step, float sin_sign) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) {
  m.impl("rope", TORCH_BOX(&hf_paged::rope));
  m.impl("rope_store", TORCH_BOX(&hf_paged::rope_store));
}
