#include "decoder.h"

#include <string.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "op.h"

namespace hf_paged {
namespace {

constexpr int64_t TOKENS_PER_ITEM = 8;  // of the operators that touch each number once

template <class Work>
void parallel_tokens(int64_t num_tokens, const Work& work) {
  const int64_t items = (num_tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM;
  Team::loop(items, [&](int64_t i) {
    const int64_t begin = i * TOKENS_PER_ITEM, end = begin + TOKENS_PER_ITEM;
    work(begin, end < num_tokens ? end : num_tokens);
  });
}

// The activations of a call: memory that the calling thread keeps, on cache lines that nothing else is on.
class Buffers {
 public:
  float* get(int index, int64_t size) {
    if ((int64_t)kept_[index].size() < size + 16) kept_[index].resize(size + 16);
    return (float*)(((uintptr_t)kept_[index].data() + 63) & ~(uintptr_t)63);
  }

 private:
  std::vector<float> kept_[5];
};

class Stack {
 public:
  explicit Stack(const DecoderCall& call) : c(call) {
    static thread_local Buffers kept;
    buffers = &kept;
  }

  void run(const DecoderLayer* layers, int64_t num_layers) {
    if (num_layers == 1 && layers[0].flow == ResidualFlow::block) return run_block(layers[0]);
    x = (float*)c.output;
    const int64_t row = c.hidden_size * sizeof(float);
    for (int64_t t = 0; t < c.num_tokens; t++)
      memcpy((char*)x + t * row, (const char*)c.hidden + t * c.hidden_stride * sizeof(float), row);
    for (int64_t i = 0; i < num_layers; i++) run_layer(layers[i]);
  }

 private:
  // Where a linear reads: the hidden state as it came, or float32 rows.
  struct Rows {
    const void* data;
    int64_t stride;
    DType dtype;
  };

  // A block up to its last linear, which is run when it is known where to; an MLP's two linears are run together.
  struct Block {
    LinearArgs last, first;
    bool has_first = false;

    void run() const { has_first ? linear_pair(first, last) : linear(last); }
  };

  void run_block(const DecoderLayer& layer) {
    const Rows in{c.hidden, c.hidden_stride, c.dtype};
    Block block = layer.has_attention ? attention(layer, in) : mlp(layer, in);
    block.last.y = c.output;
    block.last.y_stride = c.output_size;
    block.last.y_dtype = c.dtype;
    block.run();
  }

  void run_layer(const DecoderLayer& layer) {
    // What the next linear would round to bf16 anyway is handed over as such: half as much to move between cores.
    inner = rounds_inputs(layer) ? DType::bf16 : DType::f32;
    float* h = buffers->get(0, c.num_tokens * c.hidden_size);
    const Rows normed{h, c.hidden_size, inner}, plain{x, c.hidden_size, DType::f32};
    const bool sequential = layer.flow == ResidualFlow::sequential;
    if (layer.has_attention) {
      norm(layer, layer.norm1, x, h, inner);
      Block o = attention(layer, layer.norm1.present ? normed : plain);
      if (!sequential && layer.has_mlp) {  // the MLP must still see x as it was
        float* sum = buffers->get(4, c.num_tokens * c.hidden_size);
        into(o.last, sum, x, layer.residual_multiplier);
        o.run();
        if (layer.flow == ResidualFlow::parallel_two_norms) norm(layer, layer.norm2, x, h, inner);
        Block down = mlp(layer, layer.norm1.present || layer.norm2.present ? normed : plain);
        into(down.last, x, sum, layer.residual_multiplier);
        down.run();
        return;
      }
      add(layer, o, layer.post_attention_norm);
    }
    if (layer.has_mlp) {
      norm(layer, layer.norm2, x, h, inner);
      add(layer, mlp(layer, layer.norm2.present ? normed : plain), layer.post_mlp_norm);
    }
  }

  // Whether all linears of a layer round what they are given to bf16.
  static bool rounds_inputs(const DecoderLayer& layer) {
    for (const LinearPart* part : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      LinearArgs one;
      one.parts[0] = *part;
      if (part->weight && !linear_kernels(one).pairs) return false;
    }
    return true;
  }

  static void into(LinearArgs& a, float* y, const float* residual, float scale) {
    int64_t size = 0;
    for (int i = 0; i < a.num_parts; i++) size += a.parts[i].num_rows;
    a.y = y;
    a.y_stride = size;
    a.residual = residual;
    a.residual_stride = size;
    a.residual_scale = scale;
  }

  // x += what a block's last linear gives, normed before it is added if the layer has such a norm.
  void add(const DecoderLayer& layer, Block block, const NormWeights& post) {
    if (!post.present) {
      into(block.last, x, x, layer.residual_multiplier);
      block.run();
      return;
    }
    float* y = buffers->get(4, c.num_tokens * c.hidden_size);
    into(block.last, y, nullptr, 1);
    block.run();
    norm(layer, post, y, y, DType::f32);
    const int64_t size = c.hidden_size;
    parallel_tokens(c.num_tokens, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * size; i < end * size; i++) x[i] += layer.residual_multiplier * y[i];
    });
  }

  void norm(const DecoderLayer& layer, const NormWeights& weights, const float* from, void* to, DType dtype) {
    if (!weights.present) return;
    NormArgs a;
    a.x = from;
    a.y = to;
    a.y_dtype = dtype;
    a.x_outer_stride = a.y_outer_stride = a.size = c.hidden_size;
    a.x_stride = a.y_stride = c.hidden_size;
    set_weights(a, weights, layer.norm_eps, layer.norm_offset);
    run_norm(layer.norm_kind, a, c.num_tokens);
  }

  static void set_weights(NormArgs& a, const NormWeights& weights, float eps, float offset) {
    a.weight = weights.weight;
    a.bias = weights.bias;
    a.weight_dtype = weights.dtype;
    a.weight_offset = offset;
    a.eps = eps;
  }

  static void run_norm(NormKind kind, const NormArgs& a, int64_t num_tokens) {
    const auto kernel = kind == NormKind::layer ? norm_kernels().layer_norm : norm_kernels().rms;
    parallel_tokens(num_tokens, [&](int64_t begin, int64_t end) { kernel(a, begin * a.inner, end * a.inner); });
  }

  Block attention(const DecoderLayer& layer, Rows in) {
    const int64_t q = layer.num_query_heads * layer.key_dim, k = layer.num_kv_heads * layer.key_dim;
    const int64_t v = layer.num_kv_heads * layer.value_dim, size = q + k + v;
    float* qkv = buffers->get(1, c.num_tokens * size);
    LinearArgs project = reading(in, c.hidden_size);
    project.parts[0] = layer.q;
    project.parts[1] = layer.k;
    project.parts[2] = layer.v;
    project.num_parts = 3;
    project.y = qkv;
    project.y_stride = size;
    linear(project);
    norm_heads(layer, layer.q_norm, qkv, size, layer.num_query_heads);
    norm_heads(layer, layer.k_norm, qkv + q, size, layer.num_kv_heads);
    rope_store(layer, qkv, size);

    const int64_t out_size = layer.num_query_heads * layer.value_dim;
    float* out = buffers->get(2, c.num_tokens * out_size);
    AttentionArgs a = c.attention;
    a.query = qkv;
    a.query_stride = size;
    a.query_dtype = DType::f32;
    a.output = out;
    a.output_stride = out_size;
    a.output_dtype = a.cache_dtype == inner || is_quantized(a.cache_dtype) ? inner : DType::f32;
    a.lse = nullptr;
    a.key_cache = layer.key_cache;
    a.value_cache = layer.value_cache;
    a.key_scales = layer.key_scales;
    a.value_scales = layer.value_scales;
    a.num_query_heads = layer.num_query_heads;
    a.num_kv_heads = layer.num_kv_heads;
    a.key_dim = layer.key_dim;
    a.value_dim = layer.value_dim;
    a.scale = layer.scale;
    a.window = layer.window;
    a.softcap = layer.softcap;
    a.sinks = layer.sinks;
    a.alibi_slopes = layer.alibi_slopes;
    attend(a, plan_of(a));

    Block block{reading({out, out_size, a.output_dtype}, out_size), {}};
    block.last.parts[0] = layer.o;
    return block;
  }

  // Layers of one shape and window share a plan.
  const AttentionPlan& plan_of(const AttentionArgs& a) {
    const auto key = std::make_tuple(a.num_query_heads, a.num_kv_heads, a.key_dim, a.value_dim, a.window);
    auto& plan = plans[key];
    if (!plan) plan = std::make_unique<AttentionPlan>(plan_attention(a));
    return *plan;
  }

  void norm_heads(const DecoderLayer& layer, const NormWeights& weights, float* heads, int64_t row_size, int64_t num_heads) {
    if (layer.head_norm == HeadNorm::none || !weights.present) return;
    NormArgs a;
    a.x = heads;
    a.y = heads;
    a.x_outer_stride = a.y_outer_stride = row_size;
    const bool per_head = layer.head_norm == HeadNorm::per_head;
    a.size = per_head ? layer.key_dim : num_heads * layer.key_dim;
    a.inner = per_head ? num_heads : 1;
    a.x_stride = a.y_stride = a.size;
    set_weights(a, weights, layer.head_norm_eps, layer.head_norm_offset);
    run_norm(layer.head_norm_kind, a, c.num_tokens);
  }

  void rope_store(const DecoderLayer& layer, float* qkv, int64_t size) {
    RopeStoreArgs r;
    const int64_t q = layer.num_query_heads * layer.key_dim, k = layer.num_kv_heads * layer.key_dim;
    r.query = {qkv, size, layer.key_dim};
    r.key = {qkv + q, size, layer.key_dim};
    r.value = {qkv + q + k, size, layer.value_dim};
    r.query_out = {qkv, size, layer.key_dim};
    if (layer.rotates) {
      r.cos = c.cos;
      r.sin = c.sin;
      r.cos_stride = c.cos_stride;
      r.cos_dtype = c.cos_dtype;
      r.cos_step = layer.cos_step;
      r.pairs = layer.pairs;
      r.rotary_begin = layer.rotary_begin;
      r.rotary_dim = layer.rotary_dim;
      r.sin_sign = layer.sin_sign;
    }
    const int64_t block_size = c.attention.block_size;
    r.key_cache = layer.key_cache;
    r.value_cache = layer.value_cache;
    r.key_block_stride = layer.num_kv_heads * block_size * layer.key_dim;
    r.value_block_stride = layer.num_kv_heads * block_size * layer.value_dim;
    r.cache_dtype = c.attention.cache_dtype;
    r.key_scales = layer.key_scales;
    r.value_scales = layer.value_scales;
    r.slot_mapping = c.slot_mapping;
    r.num_query_heads = layer.num_query_heads;
    r.num_kv_heads = layer.num_kv_heads;
    r.key_dim = layer.key_dim;
    r.value_dim = layer.value_dim;
    r.block_size = block_size;
    parallel_tokens(c.num_tokens, [&](int64_t begin, int64_t end) { rope_kernels().rope_store(r, begin, end); });
  }

  Block mlp(const DecoderLayer& layer, Rows in) {
    const int64_t size = layer.up.num_rows;
    LinearArgs first = reading(in, c.hidden_size);
    first.gated = layer.gated;
    first.activation = layer.activation;
    first.parts[0] = layer.gated ? layer.gate : layer.up;
    first.parts[1] = layer.up;
    first.num_parts = layer.gated ? 2 : 1;
    first.y = buffers->get(3, (c.num_tokens < TOKENS_PER_CALL ? c.num_tokens : TOKENS_PER_CALL) * size);
    first.y_stride = size;
    first.y_dtype = inner;
    Block block{reading({first.y, size, inner}, size), first, true};
    block.last.parts[0] = layer.down;
    return block;
  }

  LinearArgs reading(Rows in, int64_t k) const {
    LinearArgs a;
    a.x = in.data;
    a.x_stride = in.stride;
    a.x_dtype = in.dtype;
    a.num_tokens = c.num_tokens;
    a.k = k;
    return a;
  }

  const DecoderCall& c;
  Buffers* buffers;
  float* x = nullptr;
  DType inner = DType::f32;  // of what lies between two linears
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>, std::unique_ptr<AttentionPlan>> plans;
};

}  // namespace

void decoder_layers(const DecoderCall& call, const DecoderLayer* layers, int64_t num_layers) {
  if (call.num_tokens > 0) Team::run([&] { Stack(call).run(layers, num_layers); });
}

}  // namespace hf_paged
