// Decoder layers, from hidden state to hidden state, in one call.
//
//   sequential   x += attention(norm1(x));                 x += mlp(norm2(x))
//   parallel     x += attention(norm1(x)) + mlp(norm1(x))  or, with a second norm, mlp(norm2(x))
//   block        attention(x) or mlp(x) alone, without a residual
//
// where attention = output . paged attention . rope, store . (q norm, k norm) . q, k, v, and mlp = down . activation(gate)
// * up or down . activation(up). Norms that a layer does not have are left out; post norms are applied to what a block
// gives before it is added. Between the operators everything is float32, token after token.
#pragma once
#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rope.h"

namespace hf_paged {

enum class NormKind : int32_t { none = 0, rms = 1, layer = 2 };
enum class ResidualFlow : int32_t { sequential = 0, parallel_one_norm = 1, parallel_two_norms = 2, block = 3 };
enum class HeadNorm : int32_t { none = 0, per_head = 1, full_width = 2 };

struct NormWeights {
  const void* weight = nullptr;
  const void* bias = nullptr;
  DType dtype = DType::f32;
  bool present = false;
};

struct DecoderLayer {
  bool has_attention = true, has_mlp = true;
  ResidualFlow flow = ResidualFlow::sequential;
  NormKind norm_kind = NormKind::rms;
  NormWeights norm1, norm2, post_attention_norm, post_mlp_norm, q_norm, k_norm;
  float norm_eps = 0, norm_offset = 0;
  HeadNorm head_norm = HeadNorm::none;
  NormKind head_norm_kind = NormKind::rms;
  float head_norm_eps = 0, head_norm_offset = 0;

  LinearPart q, k, v, o, gate, up, down;
  bool gated = true;
  Activation activation = Activation::silu;
  float residual_multiplier = 1;

  int64_t num_query_heads = 0, num_kv_heads = 0, key_dim = 0, value_dim = 0;
  bool rotates = false;
  RopePairs pairs = RopePairs::half;
  int64_t rotary_begin = 0, rotary_dim = 0, cos_step = 1;
  float sin_sign = 1;
  int64_t window = -1;
  float scale = 1, softcap = 0;
  const float* sinks = nullptr;
  const float* alibi_slopes = nullptr;
  void* key_cache = nullptr;
  void* value_cache = nullptr;
  f16* key_scales = nullptr;
  f16* value_scales = nullptr;
};

// What the layers of a call share.
struct DecoderCall {
  int64_t num_tokens = 0, hidden_size = 0;
  const void* hidden = nullptr;  // [num_tokens, hidden_size]
  int64_t hidden_stride = 0;
  void* output = nullptr;  // [num_tokens, size of the last linear], contiguous
  int64_t output_size = 0;
  DType dtype = DType::f32;  // of hidden and output; float32 unless the flow is `block`
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t cos_stride = 0;
  DType cos_dtype = DType::f32;
  const int64_t* slot_mapping = nullptr;
  AttentionArgs attention = {};  // block tables, lengths, cache's dtype and shape
};

// Runs on torch's threads. A `block` comes alone; other layers end with as many numbers as they start with.
void decoder_layers(const DecoderCall& call, const DecoderLayer* layers, int64_t num_layers);

}  // namespace hf_paged
