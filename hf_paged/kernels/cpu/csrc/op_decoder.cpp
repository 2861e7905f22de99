// torch.ops.hf_paged.decoder_layers: reads lists of tensors and numbers, in the order of kernels/layers.py.
#include "decoder.h"
#include "kv_tensors.h"
#include "linear_tensors.h"

namespace hf_paged {
namespace {

using OptionalTensors = std::vector<std::optional<Tensor>>;

enum Slot {
  NORM1_WEIGHT, NORM1_BIAS,
  Q_WEIGHT, K_WEIGHT, V_WEIGHT, Q_BIAS, K_BIAS, V_BIAS, Q_NORM_WEIGHT, K_NORM_WEIGHT, O_WEIGHT, O_BIAS,
  POST_ATTENTION_NORM_WEIGHT, POST_ATTENTION_NORM_BIAS,
  NORM2_WEIGHT, NORM2_BIAS,
  GATE_WEIGHT, UP_WEIGHT, DOWN_WEIGHT, GATE_BIAS, UP_BIAS, DOWN_BIAS,
  POST_MLP_NORM_WEIGHT, POST_MLP_NORM_BIAS,
  SINKS, ALIBI_SLOPES,
  NUM_SLOTS
};

// The numbers of a layer, taken one after the other.
template <class T>
class Reader {
 public:
  Reader(const std::vector<T>& all, int64_t first) : next_(all.data() + first) {}
  T operator()() { return *next_++; }

 private:
  const T* next_;
};

constexpr int NUM_INTS = 19, NUM_FLOATS = 8;

class LayerReader {
 public:
  LayerReader(const OptionalTensors& tensors, int64_t index) : tensors_(&tensors[index * NUM_SLOTS]) {}

  const Tensor* get(Slot slot) const { return tensors_[slot].has_value() ? &*tensors_[slot] : nullptr; }

  // `bare`: the norm stands there although it has no weight.
  NormWeights norm(Slot weight, std::optional<Slot> bias, int64_t size, bool bare = false) const {
    NormWeights norm;
    norm.present = bare;
    norm.weight = norm_numbers(weight, size, norm);
    if (bias) norm.bias = norm_numbers(*bias, size, norm);
    return norm;
  }

  const void* norm_numbers(Slot slot, int64_t size, NormWeights& norm) const {
    const Tensor* tensor = get(slot);
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(tensor->is_contiguous() && tensor->numel() == size,
                    "decoder_layers: weights of a norm must be contiguous and fit its input");
    STD_TORCH_CHECK(!norm.weight || dtype_of(*tensor) == norm.dtype,
                    "decoder_layers: weight and bias of a norm must have the same dtype");
    norm.present = true;
    norm.dtype = dtype_of(*tensor);
    return tensor->const_data_ptr();
  }

  LinearPart linear(Slot weight, Slot bias, int64_t k) const {
    const Tensor* tensor = get(weight);
    STD_TORCH_CHECK(tensor, "decoder_layers: a weight is missing");
    return linear_part(*tensor, get(bias), k);
  }

  const float* floats(Slot slot, int64_t size) const {
    const Tensor* tensor = get(slot);
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(tensor->scalar_type() == torch::headeronly::ScalarType::Float && tensor->is_contiguous() &&
                        tensor->numel() == size,
                    "decoder_layers: sinks and ALiBi slopes must be float32, one per query head");
    return (const float*)tensor->const_data_ptr();
  }

 private:
  const std::optional<Tensor>* tensors_;
};

DecoderLayer read_layer(const LayerReader& reader, Reader<int64_t> ints, Reader<double> floats, int64_t hidden_size) {
  DecoderLayer l;
  l.has_attention = ints();
  l.has_mlp = ints();
  l.norm_kind = (NormKind)ints();
  l.flow = (ResidualFlow)ints();
  l.num_query_heads = ints();
  l.num_kv_heads = ints();
  l.key_dim = ints();
  l.value_dim = ints();
  const int64_t rope_layout = ints();  // 0 none, else 1 + RopePairs
  STD_TORCH_CHECK(rope_layout >= 0 && rope_layout <= 3, "decoder_layers: unknown rope layout ", rope_layout);
  l.rotates = rope_layout > 0;
  l.pairs = (RopePairs)(l.rotates ? rope_layout - 1 : 0);
  l.rotary_begin = ints();
  l.rotary_dim = ints();
  l.cos_step = ints();
  l.head_norm = (HeadNorm)ints();
  l.head_norm_kind = (NormKind)ints();
  const int64_t activation = ints();
  STD_TORCH_CHECK(activation >= 0 && activation < num_activations, "decoder_layers: unknown activation ", activation);
  l.activation = (Activation)activation;
  l.window = ints();
  const bool bare_norms = ints();  // norms without weights stand where norm1 and norm2 do
  const bool bare_head_norms = ints();
  l.gated = ints();
  l.norm_eps = (float)floats();
  l.norm_offset = (float)floats();
  l.head_norm_eps = (float)floats();
  l.head_norm_offset = (float)floats();
  l.scale = (float)floats();
  l.softcap = (float)floats();
  l.residual_multiplier = (float)floats();
  l.sin_sign = (float)floats();

  if (l.flow != ResidualFlow::block) {
    l.norm1 = reader.norm(NORM1_WEIGHT, NORM1_BIAS, hidden_size, bare_norms);
    l.norm2 = reader.norm(NORM2_WEIGHT, NORM2_BIAS, hidden_size, bare_norms);
    l.post_attention_norm = reader.norm(POST_ATTENTION_NORM_WEIGHT, POST_ATTENTION_NORM_BIAS, hidden_size);
    l.post_mlp_norm = reader.norm(POST_MLP_NORM_WEIGHT, POST_MLP_NORM_BIAS, hidden_size);
    STD_TORCH_CHECK(l.flow == ResidualFlow::sequential || !(l.post_attention_norm.present || l.post_mlp_norm.present),
                    "decoder_layers: parallel blocks have no norms after them");
  }
  if (l.has_attention) {
    STD_TORCH_CHECK(l.num_kv_heads > 0 && l.num_query_heads > 0 && l.num_query_heads % l.num_kv_heads == 0,
                    "decoder_layers: query heads must be a multiple of K/V heads");
    l.q = reader.linear(Q_WEIGHT, Q_BIAS, hidden_size);
    l.k = reader.linear(K_WEIGHT, K_BIAS, hidden_size);
    l.v = reader.linear(V_WEIGHT, V_BIAS, hidden_size);
    l.o = reader.linear(O_WEIGHT, O_BIAS, l.num_query_heads * l.value_dim);
    agree_on_activations({&l.q, &l.k, &l.v});
    STD_TORCH_CHECK(l.q.num_rows == l.num_query_heads * l.key_dim && l.k.num_rows == l.num_kv_heads * l.key_dim &&
                        l.v.num_rows == l.num_kv_heads * l.value_dim,
                    "decoder_layers: q, k and v do not fit the heads");
    const bool wide = l.head_norm == HeadNorm::full_width;
    l.q_norm = reader.norm(Q_NORM_WEIGHT, {}, wide ? l.q.num_rows : l.key_dim, bare_head_norms);
    l.k_norm = reader.norm(K_NORM_WEIGHT, {}, wide ? l.k.num_rows : l.key_dim, bare_head_norms);
    STD_TORCH_CHECK(!l.rotates || (l.rotary_dim >= 0 && l.rotary_dim % 2 == 0 && l.rotary_dim <= max_rotary_dim &&
                                   l.rotary_begin >= 0 && l.rotary_begin <= l.key_dim - l.rotary_dim),
                    "decoder_layers: the rotary part does not fit the heads");
    STD_TORCH_CHECK(l.cos_step == 1 || l.cos_step == 2, "decoder_layers: cos_step must be 1 or 2");
    l.sinks = reader.floats(SINKS, l.num_query_heads);
    l.alibi_slopes = reader.floats(ALIBI_SLOPES, l.num_query_heads);
  }
  if (l.has_mlp) {
    if (l.gated) l.gate = reader.linear(GATE_WEIGHT, GATE_BIAS, hidden_size);
    l.up = reader.linear(UP_WEIGHT, UP_BIAS, hidden_size);
    l.down = reader.linear(DOWN_WEIGHT, DOWN_BIAS, l.up.num_rows);
    if (l.gated) agree_on_activations({&l.gate, &l.up});
    STD_TORCH_CHECK(!l.gated || l.gate.num_rows == l.up.num_rows, "decoder_layers: gate and up must have equal rows");
  }
  return l;
}

int64_t output_size(const DecoderLayer& layer) { return layer.has_mlp ? layer.down.num_rows : layer.o.num_rows; }

// Pointers and strides of cos and sin: [tokens, n] or [1, n].
void set_angles(DecoderCall& call, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                const std::vector<DecoderLayer>& layers) {
  bool rotates = false;
  for (const DecoderLayer& l : layers) rotates = rotates || (l.has_attention && l.rotates);
  if (!rotates) return;
  STD_TORCH_CHECK(cos.has_value() && sin.has_value(), "decoder_layers: layers that rotate need cos and sin");
  for (const Tensor* t : {&*cos, &*sin})
    STD_TORCH_CHECK(t->dim() == 2 && (t->size(0) == call.num_tokens || t->size(0) == 1) && t->stride(1) == 1 &&
                        t->size(0) == cos->size(0) && t->size(1) == cos->size(1) && t->stride(0) == cos->stride(0) &&
                        dtype_of(*t) == dtype_of(*cos),
                    "decoder_layers: cos and sin must be [tokens, n] with contiguous rows, alike");
  for (const DecoderLayer& l : layers)
    STD_TORCH_CHECK(!l.has_attention || !l.rotates || (l.rotary_dim / 2 - 1) * l.cos_step < cos->size(1),
                    "decoder_layers: cos is too short");
  call.cos = cos->const_data_ptr();
  call.sin = sin->const_data_ptr();
  call.cos_stride = cos->size(0) == 1 ? 0 : cos->stride(0);
  call.cos_dtype = dtype_of(*cos);
}

// K/V blocks of the layers that have attention, with their scales if they are quantized.
struct Caches {
  const std::vector<Tensor>&keys, &key_scales, &values, &value_scales;
};

void set_caches(DecoderCall& call, std::vector<DecoderLayer>& layers, const Caches& caches) {
  const auto &keys = caches.keys, &values = caches.values;
  const auto scales_at = [](const std::vector<Tensor>& all, size_t i) { return i < all.size() ? &all[i] : nullptr; };
  size_t i = 0;
  for (DecoderLayer& l : layers) {
    if (!l.has_attention) continue;
    STD_TORCH_CHECK(i < keys.size() && i < values.size(), "decoder_layers: a layer has no K/V blocks");
    const Tensor &k = keys[i], &v = values[i++];
    STD_TORCH_CHECK(k.dim() == 4 && v.dim() == 4 && k.is_contiguous() && v.is_contiguous() && k.size(0) == v.size(0) &&
                        k.size(2) == v.size(2) && k.size(1) == l.num_kv_heads && v.size(1) == l.num_kv_heads &&
                        k.size(3) == l.key_dim && v.size(3) == l.value_dim && k.size(2) > 0,
                    "decoder_layers: K/V blocks do not fit the heads");
    if (i == 1) {
      call.attention.num_blocks = k.size(0);
      call.attention.block_size = k.size(2);
      call.attention.cache_dtype = cache_dtype_of(k);
    }
    STD_TORCH_CHECK(k.size(0) == call.attention.num_blocks && k.size(2) == call.attention.block_size &&
                        cache_dtype_of(k) == call.attention.cache_dtype && k.scalar_type() == v.scalar_type(),
                    "decoder_layers: the K/V blocks of all layers must be alike");
    l.key_scales = scales_of(k, scales_at(caches.key_scales, i - 1), "decoder_layers");
    l.value_scales = scales_of(v, scales_at(caches.value_scales, i - 1), "decoder_layers");
    STD_TORCH_CHECK(!l.key_scales || (l.key_dim <= max_quantized_dim && l.value_dim <= max_quantized_dim),
                    "decoder_layers: heads of quantized K/V are at most ", max_quantized_dim);
    l.key_cache = k.mutable_data_ptr();
    l.value_cache = v.mutable_data_ptr();
  }
}

template <class T>
const T* integers(const Tensor& tensor, torch::headeronly::ScalarType type, int64_t size, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous() && tensor.numel() == size,
                  "decoder_layers: ", name, " must be contiguous, of the right integer type and of ", size, " numbers");
  return (const T*)tensor.const_data_ptr();
}

void set_metadata(DecoderCall& call, const Tensor& block_tables, const Tensor& slots, const Tensor& cu_seqlens,
                  const Tensor& seq_lens) {
  using torch::headeronly::ScalarType;
  AttentionArgs& a = call.attention;
  STD_TORCH_CHECK(block_tables.dim() == 2 && block_tables.scalar_type() == ScalarType::Int &&
                      (block_tables.size(1) <= 1 || block_tables.stride(1) == 1),
                  "decoder_layers: block_tables must be int32 [requests, blocks] with contiguous rows");
  a.num_requests = block_tables.size(0);
  a.block_tables = (const int32_t*)block_tables.const_data_ptr();
  a.block_tables_stride = block_tables.stride(0);
  a.max_blocks = block_tables.size(1);
  a.cu_seqlens_q = integers<int32_t>(cu_seqlens, ScalarType::Int, a.num_requests + 1, "cu_seqlens_q");
  a.seq_lens = integers<int32_t>(seq_lens, ScalarType::Int, a.num_requests, "seq_lens");
  call.slot_mapping = integers<int64_t>(slots, ScalarType::Long, call.num_tokens, "slot_mapping");
  STD_TORCH_CHECK(a.cu_seqlens_q[0] == 0 && a.cu_seqlens_q[a.num_requests] == call.num_tokens,
                  "decoder_layers: cu_seqlens_q does not end at the number of tokens");
  int64_t capacity = (int64_t)block_tables.size(1) * a.block_size;
  for (int64_t r = 0; r < a.num_requests; r++)
    STD_TORCH_CHECK(a.seq_lens[r] <= capacity, "decoder_layers: a context is longer than its block table");
  const int64_t end = a.num_blocks * a.block_size;
  for (int64_t t = 0; t < call.num_tokens; t++)
    STD_TORCH_CHECK(call.slot_mapping[t] < end, "decoder_layers: slot ", call.slot_mapping[t], " lies outside of the ",
                    a.num_blocks, " blocks");
}

Tensor decoder_layers_op(Tensor hidden, OptionalTensors tensors, std::vector<int64_t> ints, std::vector<double> floats,
                         std::optional<Tensor> cos, std::optional<Tensor> sin, std::vector<Tensor> key_caches,
                         std::vector<Tensor> key_scales, std::vector<Tensor> value_caches,
                         std::vector<Tensor> value_scales, Tensor block_tables, Tensor slot_mapping,
                         Tensor cu_seqlens_q, Tensor seq_lens) {
  const int64_t num_layers = tensors.size() / NUM_SLOTS;
  STD_TORCH_CHECK(num_layers > 0 && (int64_t)tensors.size() == num_layers * NUM_SLOTS &&
                      (int64_t)ints.size() == num_layers * NUM_INTS && (int64_t)floats.size() == num_layers * NUM_FLOATS,
                  "decoder_layers: ", NUM_SLOTS, " tensors, ", NUM_INTS, " ints and ", NUM_FLOATS, " floats per layer");
  STD_TORCH_CHECK(hidden.dim() == 2 && hidden.stride(1) == 1, "decoder_layers: hidden must be [tokens, size] with "
                  "contiguous rows");
  DecoderCall call;
  call.num_tokens = hidden.size(0);
  call.hidden_size = hidden.size(1);
  call.hidden = hidden.const_data_ptr();
  call.hidden_stride = hidden.stride(0);
  call.dtype = dtype_of(hidden);
  std::vector<DecoderLayer> layers;
  for (int64_t i = 0; i < num_layers; i++)
    layers.push_back(read_layer(LayerReader(tensors, i), Reader<int64_t>(ints, i * NUM_INTS),
                                Reader<double>(floats, i * NUM_FLOATS), call.hidden_size));
  call.output_size = output_size(layers.back());
  for (const DecoderLayer& layer : layers) {
    const bool block = layer.flow == ResidualFlow::block;
    STD_TORCH_CHECK(!block || (num_layers == 1 && layer.has_attention != layer.has_mlp), "decoder_layers: a block comes alone");
    STD_TORCH_CHECK(block || (call.dtype == DType::f32 && output_size(layer) == call.hidden_size &&
                              (!layer.has_attention || layer.o.num_rows == call.hidden_size)),
                    "decoder_layers: hidden must be float32, and layers must keep its size");
  }
  set_angles(call, cos, sin, layers);
  set_caches(call, layers, {key_caches, key_scales, value_caches, value_scales});
  if (!key_caches.empty()) set_metadata(call, block_tables, slot_mapping, cu_seqlens_q, seq_lens);
  Tensor output = torch::stable::new_empty(hidden, {call.num_tokens, call.output_size});
  call.output = output.mutable_data_ptr();
  decoder_layers(call, layers.data(), num_layers);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def(
      "decoder_layers(Tensor hidden, Tensor?[] tensors, int[] ints, float[] floats, Tensor? cos, Tensor? sin, "
      "Tensor(a!)[] key_caches, Tensor(b!)[] key_scales, Tensor(c!)[] value_caches, Tensor(d!)[] value_scales, "
      "Tensor block_tables, Tensor slot_mapping, Tensor cu_seqlens_q, Tensor seq_lens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) { m.impl("decoder_layers", TORCH_BOX(&decoder_layers_op)); }

}  // namespace hf_paged
