// The paged attention operator, and how a planned call runs on torch's threads.
#include <memory>
#include <tuple>

#include "attention.h"
#include "kv_tensors.h"

namespace hf_paged {
namespace {

// 64-byte aligned memory that a thread keeps between calls.
class Workspace {
 public:
  float* get(int64_t size) {
    if (size > size_) {
      memory_.reset(new float[size + 16]);
      size_ = size;
    }
    return (float*)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};

AttentionItem item_of(const AttentionArgs& args, const AttentionPlan& plan, const AttentionPlan::Piece& piece,
                      float* partials) {
  const int32_t* tokens = plan.tokens.data() + piece.first_token;
  const bool whole = plan.num_parts[tokens[0]] == 1;
  return {tokens, plan.positions.data(), args.block_tables + piece.request * args.block_tables_stride,
          piece.num_tokens, piece.first_head, piece.num_heads, piece.kv_head, piece.first_key, piece.end_key,
          whole ? nullptr : partials, plan.first_parts.data(), piece.part};
}

// Whether all rows of an item see all of its keys.
bool sees_all(const AttentionArgs& args, const AttentionItem& item) {
  for (int i = 0; i < item.num_tokens; i++) {
    const int64_t position = item.positions[item.tokens[i]];
    if (position + 1 < item.end_key || (args.window > 0 && position - args.window >= item.first_key)) return false;
  }
  return true;
}

void run_item(const AttentionKernels& kernels, const AttentionArgs& args, const AttentionItem& item) {
  static thread_local Workspace workspace;
  float* scratch = workspace.get(kernels.scratch_size(args));
  if (item.num_tokens * item.num_heads <= FEW_ROWS && sees_all(args, item)) kernels.few_rows(args, item, scratch);
  else kernels.many_rows(args, item, scratch);
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionPlan& plan) {
  static thread_local Workspace workspace;
  const AttentionKernels& kernels = attention_kernels(args.cache_dtype);
  float* partials = workspace.get(plan.total_parts * args.num_query_heads * partial_size(args));
  // How many pieces of each (token, K/V head) are done.
  const int64_t counters = plan.total_parts ? plan.positions.size() * args.num_kv_heads : 0;
  std::vector<std::atomic<int32_t>> done(counters);
  const int64_t group = args.num_query_heads / args.num_kv_heads;
  Team::loop(plan.pieces.size(), [&](int64_t index) {
    const AttentionItem item = item_of(args, plan, plan.pieces[index], partials);
    run_item(kernels, args, item);
    if (!item.partials) return;
    for (int i = 0; i < item.num_tokens; i++) {
      const int32_t token = item.tokens[i], parts = plan.num_parts[token];
      if (done[token * args.num_kv_heads + item.kv_head].fetch_add(1) + 1 < parts * plan.pieces_per_part) continue;
      kernels.merge(args, partials, plan.first_parts[token], parts, token, item.kv_head * group, group);
    }
  }, Take::one);
}

namespace {

void check_cache(const Tensor& cache, const char* name, const Tensor& query) {
  STD_TORCH_CHECK(cache.dim() == 4 && cache.is_contiguous(), "hf_paged::paged_attention: ", name,
                  " must be contiguous, [num_blocks, num_kv_heads, block_size, head_dim]");
  STD_TORCH_CHECK(query.scalar_type() == cache.scalar_type() || is_quantized(cache_dtype_of(cache)) ||
                      query.scalar_type() == torch::headeronly::ScalarType::Float,
                  "hf_paged::paged_attention: query must be float32 or of the dtype of ", name);
}

const int32_t* int32_data(const Tensor& tensor, const char* name, int64_t dim) {
  STD_TORCH_CHECK(tensor.dim() == dim && tensor.scalar_type() == torch::headeronly::ScalarType::Int &&
                      tensor.stride(dim - 1) == 1,
                  "hf_paged::paged_attention: ", name, " must be int32 of ", dim, " dimensions, the last contiguous");
  return (const int32_t*)tensor.const_data_ptr();
}

const float* per_head(const std::optional<Tensor>& tensor, const char* name, int64_t num_heads) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->numel() == num_heads && tensor->is_contiguous() &&
                      tensor->scalar_type() == torch::headeronly::ScalarType::Float,
                  "hf_paged::paged_attention: ", name, " must be contiguous float32 of ", num_heads, " numbers");
  return (const float*)tensor->const_data_ptr();
}

void check_shapes(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, int64_t num_requests,
                  const Tensor& block_tables, const Tensor& cu_seqlens_q) {
  check_cache(key_cache, "key_cache", query);
  check_cache(value_cache, "value_cache", query);
  STD_TORCH_CHECK(query.dim() == 3 && query.size(2) == key_cache.size(3) && query.stride(2) == 1 &&
                      (query.stride(1) == query.size(2) || query.size(1) == 1),
                  "hf_paged::paged_attention: query must be [num_tokens, num_query_heads, ", key_cache.size(3),
                  "], heads and dimensions contiguous");
  STD_TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type() && key_cache.size(0) == value_cache.size(0) &&
                      key_cache.size(1) == value_cache.size(1) && key_cache.size(2) == value_cache.size(2),
                  "hf_paged::paged_attention: key_cache and value_cache differ in dtype, blocks, heads or block size");
  STD_TORCH_CHECK(key_cache.size(1) > 0 && query.size(1) > 0 && query.size(1) % key_cache.size(1) == 0,
                  "hf_paged::paged_attention: ", query.size(1), " query heads are no multiple of ", key_cache.size(1),
                  " key/value heads");
  STD_TORCH_CHECK(key_cache.size(2) > 0, "hf_paged::paged_attention: blocks must have room for at least one token");
  STD_TORCH_CHECK(cu_seqlens_q.size(0) == num_requests + 1 && block_tables.size(0) >= num_requests,
                  "hf_paged::paged_attention: seq_lens has ", num_requests, " requests, cu_seqlens_q ",
                  cu_seqlens_q.size(0) - 1, ", block_tables ", block_tables.size(0));
}

std::tuple<Tensor, Tensor> paged_attention(Tensor query, Tensor key_cache, Tensor value_cache,
                                           std::optional<Tensor> key_scales, std::optional<Tensor> value_scales,
                                           Tensor block_tables, Tensor cu_seqlens_q, Tensor seq_lens, double scale,
                                           int64_t window, double softcap, std::optional<Tensor> sinks,
                                           std::optional<Tensor> alibi_slopes, bool return_lse) {
  STD_TORCH_CHECK(current_isa() != Isa::none, "hf_paged::paged_attention: this processor has no AVX2");
  AttentionArgs args{};
  args.block_tables = int32_data(block_tables, "block_tables", 2);
  args.cu_seqlens_q = int32_data(cu_seqlens_q, "cu_seqlens_q", 1);
  args.seq_lens = int32_data(seq_lens, "seq_lens", 1);
  args.num_requests = seq_lens.size(0);
  check_shapes(query, key_cache, value_cache, args.num_requests, block_tables, cu_seqlens_q);
  const int64_t num_tokens = query.size(0);
  const int64_t last = args.cu_seqlens_q[args.num_requests];
  STD_TORCH_CHECK(last == num_tokens, "hf_paged::paged_attention: cu_seqlens_q ends at ", last, ", query has ",
                  num_tokens, " tokens");
  args.block_tables_stride = block_tables.stride(0);
  args.max_blocks = block_tables.size(1);
  args.num_blocks = key_cache.size(0);
  args.num_kv_heads = key_cache.size(1);
  args.block_size = key_cache.size(2);
  args.key_dim = key_cache.size(3);
  args.value_dim = value_cache.size(3);
  args.num_query_heads = query.size(1);
  args.query = query.const_data_ptr();
  args.query_stride = query.stride(0);
  args.query_dtype = args.output_dtype = dtype_of(query);
  args.key_cache = key_cache.const_data_ptr();
  args.value_cache = value_cache.const_data_ptr();
  args.cache_dtype = cache_dtype_of(key_cache);
  args.key_scales = scales_of(key_cache, key_scales ? &*key_scales : nullptr, "hf_paged::paged_attention");
  args.value_scales = scales_of(value_cache, value_scales ? &*value_scales : nullptr, "hf_paged::paged_attention");
  args.scale = (float)scale;
  args.window = window;
  args.softcap = (float)softcap;
  args.sinks = per_head(sinks, "sinks", args.num_query_heads);
  args.alibi_slopes = per_head(alibi_slopes, "alibi_slopes", args.num_query_heads);
  Tensor output = torch::stable::new_empty(query, {num_tokens, args.num_query_heads, args.value_dim});
  Tensor lse = torch::stable::new_empty(query, {return_lse ? num_tokens : 0, args.num_query_heads},
                                        torch::headeronly::ScalarType::Float);
  args.output = output.mutable_data_ptr();
  args.output_stride = args.num_query_heads * args.value_dim;
  args.lse = return_lse ? (float*)lse.mutable_data_ptr() : nullptr;
  attend(args);
  return {output, lse};
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? key_scales, Tensor? value_scales, "
      "Tensor block_tables, Tensor cu_seqlens_q, Tensor seq_lens, float scale, int window, float softcap, "
      "Tensor? sinks, Tensor? alibi_slopes, bool return_lse) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) { m.impl("paged_attention", TORCH_BOX(&hf_paged::paged_attention)); }
