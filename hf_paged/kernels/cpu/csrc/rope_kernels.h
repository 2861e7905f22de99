// Rotary position embedding and the store of K/V, written once for all instruction sets; include it after vec_*.h.
//
// The angles of a token are widened once and used by all its heads. Arithmetic is in float32 and rounds once, where a
// number is written.
#pragma once
#include "kv_codes.h"
#include "rope.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// A token's cos and sin, laid out as its pairs are:
//   half (and interleaved_to_half):  cos  c0 c1 c2 ...         sin   s0 s1 s2 ...
//   interleaved:                     cos  c0 c0 c1 c1 ...      sin  -s0 s0 -s1 s1 ...
struct Angles {
  float cos[max_rotary_dim], sin[max_rotary_dim];
};

INLINE float widen_one(float x) { return x; }
INLINE float widen_one(f16 x) { return _cvtsh_ss(x.bits); }
INLINE float widen_one(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// T: of the tables.
template <class T>
static void read_angles(const RopeStoreArgs& args, int64_t token, Angles& angles) {
  const T* cos = (const T*)args.cos + token * args.cos_stride;
  const T* sin = (const T*)args.sin + token * args.cos_stride;
  const int64_t pairs = args.rotary_dim / 2, step = args.cos_step;
  const float sign = args.sin_sign;
  if (args.pairs == RopePairs::interleaved) {
    for (int64_t i = 0; i < pairs; i++) {
      const float c = widen_one(cos[i * step]), s = widen_one(sin[i * step]) * sign;
      angles.cos[2 * i] = angles.cos[2 * i + 1] = c;
      angles.sin[2 * i] = -s;
      angles.sin[2 * i + 1] = s;
    }
  } else {
    for (int64_t i = 0; i < pairs; i++) {
      angles.cos[i] = widen_one(cos[i * step]);
      angles.sin[i] = widen_one(sin[i * step]) * sign;
    }
  }
}

template <class T>
INLINE void copy(const T* from, T* to, int64_t n) {
  if (from != to) memcpy(to, from, n * sizeof(T));
}

template <class X, class Y>
INLINE void copy(const X* from, Y* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store(to + i, load(from + i, (int)(n - i)), (int)(n - i));
}

// The functions below rotate `dim` numbers; y may be x.
template <class X, class Y>
INLINE void rotate_half(const X* x, Y* y, const Angles& angles, int64_t dim) {
  const int64_t pairs = dim / 2;
  int64_t i = 0;
  for (; i + W <= pairs; i += W) {
    const Vec a = load(x + i), b = load(x + pairs + i), c = load(angles.cos + i), s = load(angles.sin + i);
    store(y + i, sub(mul(a, c), mul(b, s)));
    store(y + pairs + i, fma(b, c, mul(a, s)));
  }
  const int n = (int)(pairs - i);
  if (!n) return;
  const Vec a = load(x + i, n), b = load(x + pairs + i, n), c = load(angles.cos + i, n), s = load(angles.sin + i, n);
  store(y + i, sub(mul(a, c), mul(b, s)), n);
  store(y + pairs + i, fma(b, c, mul(a, s)), n);
}

template <class X, class Y>
INLINE void rotate_interleaved(const X* x, Y* y, const Angles& angles, int64_t dim) {
  int64_t i = 0;
  for (; i + W <= dim; i += W) {
    const Vec a = load(x + i);
    store(y + i, fma(a, load(angles.cos + i), mul(swap_pairs(a), load(angles.sin + i))));
  }
  const int n = (int)(dim - i);
  if (!n) return;
  const Vec a = load(x + i, n);
  store(y + i, fma(a, load(angles.cos + i, n), mul(swap_pairs(a), load(angles.sin + i, n))), n);
}

template <class X, class Y>
INLINE void rotate_to_half(const X* x, Y* y, const Angles& angles, int64_t dim) {
  float pairs[max_rotary_dim], halves[max_rotary_dim];
  copy(x, pairs, dim);
  for (int64_t i = 0; i < dim / 2; i++) {
    halves[i] = pairs[2 * i];
    halves[dim / 2 + i] = pairs[2 * i + 1];
  }
  rotate_half(halves, y, angles, dim);
}

template <class X, class Y>
static void rotate_head(const RopeStoreArgs& args, const Angles& angles, const X* x, Y* y) {
  const int64_t begin = args.rotary_begin, dim = args.rotary_dim, end = begin + dim;
  if (begin > 0) copy(x, y, begin);
  if (end < args.key_dim) copy(x + end, y + end, args.key_dim - end);
  if (args.pairs == RopePairs::half) rotate_half(x + begin, y + begin, angles, dim);
  if (args.pairs == RopePairs::interleaved) rotate_interleaved(x + begin, y + begin, angles, dim);
  if (args.pairs == RopePairs::interleaved_to_half) rotate_to_half(x + begin, y + begin, angles, dim);
}

// Rotates a head or, without angles, copies it.
template <class X, class Y>
INLINE void write_head(const RopeStoreArgs& args, const Angles* angles, const X* x, Y* y, int64_t dim) {
  if (angles) {
    rotate_head(args, *angles, x, y);
  } else {
    copy(x, y, dim);
  }
}

// Where the heads of a slot begin in a cache, in elements; they are block_size * dim apart.
INLINE int64_t place_of(const RopeStoreArgs& args, int64_t slot, int64_t block_stride, int64_t dim) {
  return slot / args.block_size * block_stride + slot % args.block_size * dim;
}

// One of the two caches.
struct RopeCache {
  void* data;
  f16* scales;
  int64_t block_stride, dim;
};

// X: dtype of the heads; C: of the cache.
template <class X, class C>
static void store_heads(const RopeStoreArgs& args, const Angles* angles, const RopeHeads& heads, int64_t token,
                        int64_t slot, const RopeCache& cache) {
  const X* x = (const X*)heads.data + token * heads.token_stride;
  C* to = (C*)cache.data + place_of(args, slot, cache.block_stride, cache.dim);
  f16* scale = cache.scales + place_of(args, slot, args.num_kv_heads * args.block_size, 1);
  for (int64_t head = 0; head < args.num_kv_heads; head++, x += heads.head_stride, to += args.block_size * cache.dim) {
    if constexpr (Codes<C>::ARE) {
      float numbers[max_quantized_dim];
      const int64_t padded = padded_head(cache.dim);
      if (padded > cache.dim) store(numbers + padded - W, zero());
      write_head(args, angles, x, numbers, cache.dim);
      quantize(numbers, cache.dim, to, scale + head * args.block_size);
    } else {
      write_head(args, angles, x, to, cache.dim);
    }
  }
}

// X: dtype of query, key and value; C: of the caches.
template <class X, class C>
static void store_token(const RopeStoreArgs& args, const Angles* angles, int64_t token) {
  const int64_t slot = args.slot_mapping[token];
  if (slot < 0) return;
  if (args.key_cache)
    store_heads<X, C>(args, angles, args.key, token, slot,
                      {args.key_cache, args.key_scales, args.key_block_stride, args.key_dim});
  if (args.value_cache)
    store_heads<X, C>(args, nullptr, args.value, token, slot,
                      {args.value_cache, args.value_scales, args.value_block_stride, args.value_dim});
}

// X: dtype of query, key and value; Y: of query_out and key_out.
template <class X, class Y>
static void rotate_token(const RopeStoreArgs& args, const Angles* angles, int64_t token) {
  const auto rotate = [&](const RopeHeads& from, const RopeOutput& to, int64_t heads) {
    if (!to.data) return;
    const X* x = (const X*)from.data + token * from.token_stride;
    Y* y = (Y*)to.data + token * to.token_stride;
    for (int64_t head = 0; head < heads; head++, x += from.head_stride, y += to.head_stride)
      write_head(args, angles, x, y, args.key_dim);
  };
  rotate(args.query, args.query_out, args.num_query_heads);
  rotate(args.key, args.key_out, args.num_kv_heads);
}

static void rope_store(const RopeStoreArgs& args, int64_t begin, int64_t end) {
  typedef void (*Step)(const RopeStoreArgs&, const Angles*, int64_t);
  Step store = nullptr, rotate = nullptr;
  void (*read)(const RopeStoreArgs&, int64_t, Angles&) = nullptr;
  with_type(args.dtype, [&](auto x) {
    const auto store_as = [&](auto c) { store = store_token<decltype(x), decltype(c)>; };
    is_quantized(args.cache_dtype) ? with_code_type(args.cache_dtype, store_as) : with_type(args.cache_dtype, store_as);
    with_type(args.out_dtype, [&](auto y) { rotate = rotate_token<decltype(x), decltype(y)>; });
  });
  with_type(args.cos_dtype, [&](auto t) { read = read_angles<decltype(t)>; });
  const bool stores = args.key_cache || args.value_cache;
  Angles angles;
  for (int64_t token = begin; token < end; token++) {
    if (args.cos) read(args, token, angles);
    // The store comes first: the outputs may overwrite query and key.
    if (stores) store(args, args.cos ? &angles : nullptr, token);
    rotate(args, args.cos ? &angles : nullptr, token);
  }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
