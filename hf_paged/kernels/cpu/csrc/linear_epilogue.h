// From a tile of sums to y: bias, activation, gate times up, residual, rounding.
#pragma once
#include "activation_kernels.h"
#include "linear.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// sums [column][token] -> out [token][column]
static void turn(const float* sums, int num_columns, int64_t num_tokens, float* out) {
  for (int n = 0; n < num_columns; n += W)
    for (int64_t m = 0; m < num_tokens; m += W) {
      Vec r[W];
      for (int i = 0; i < W; i++) r[i] = load(sums + (n + i) * MAX_WIDTH + m);
      transpose(r);
      for (int i = 0; i < W; i++) store(out + (m + i) * COLUMNS + n, r[i]);
    }
}

// tile = activation(tile + bias) [* (up_tile + up_bias)]; whole vectors, as tile and biases hold COLUMNS numbers.
template <Activation A, bool GATED>
static void activate_tile(const LinearOutput& o) {
  for (int64_t m = 0; m < o.num_tokens; m++)
    for (int n = 0; n < o.num_columns; n += W) {
      float* p = o.tile + m * COLUMNS + n;
      Vec x = load(p);
      if (o.bias) x = add(x, load(o.bias + n));
      x = activate<A>(x);
      if (GATED) {
        Vec up = load(o.up_tile + m * COLUMNS + n);
        if (o.up_bias) up = add(up, load(o.up_bias + n));
        x = mul(x, up);
      }
      store(p, x);
    }
}

template <class Residual, class Y>
static void write_tile(const LinearArgs& a, const LinearOutput& o) {
  const Vec scale = set(a.residual_scale);
  for (int64_t m = 0; m < o.num_tokens; m++) {
    const float* p = o.tile + m * COLUMNS;
    const int64_t token = o.first_token + m;
    const Residual* r = (const Residual*)a.residual + token * a.residual_stride + o.first_column;
    Y* y = (Y*)a.y + token * a.y_stride + o.first_column;
    int n = 0;
    for (; n + W <= o.num_columns; n += W) store(y + n, a.residual ? fma(load(p + n), scale, load(r + n)) : load(p + n));
    const int rest = o.num_columns - n;
    if (rest > 0) store(y + n, a.residual ? fma(load(p + n), scale, load(r + n, rest)) : load(p + n), rest);
  }
}

// What a column gives for a vector of tokens.
template <Activation A, bool GATED>
INLINE Vec activated(const LinearOutput& o, int column, int64_t token) {
  Vec x = load(o.tile + column * MAX_WIDTH + token);
  if (o.bias) x = add(x, set(o.bias[column]));
  x = activate<A>(x);
  if (!GATED) return x;
  Vec up = load(o.up_tile + column * MAX_WIDTH + token);
  if (o.up_bias) up = add(up, set(o.up_bias[column]));
  return mul(x, up);
}

template <Activation A, bool GATED>
static void pack_tile(const LinearOutput& o, float* block, int64_t width, bool pairs) {
  float* out = block + (pairs ? o.first_column / 2 : o.first_column) * width;
  for (int n = 0; n < o.num_columns; n += pairs ? 2 : 1, out += width)
    for (int64_t m = 0; m < width; m += W) {
      const Vec x = activated<A, GATED>(o, n, m);
      if (!pairs) store(out + m, x);
      else store(out + m, bf16_pairs(x, n + 1 < o.num_columns ? activated<A, GATED>(o, n + 1, m) : zero()));
    }
}

static void pack_output(const LinearArgs& a, const LinearOutput& o, void* block, int64_t width, bool pairs) {
  with_activation(a.activation, [&](auto activation) {
    if (a.gated) pack_tile<decltype(activation)::value, true>(o, (float*)block, width, pairs);
    else pack_tile<decltype(activation)::value, false>(o, (float*)block, width, pairs);
  });
}

INLINE void activate(const LinearArgs& a, const LinearOutput& o) {
  if (a.activation == Activation::identity && !a.gated && !o.bias) return;
  with_activation(a.activation, [&](auto activation) {
    if (a.gated) activate_tile<decltype(activation)::value, true>(o);
    else activate_tile<decltype(activation)::value, false>(o);
  });
}

static void finish(const LinearArgs& a, const LinearOutput& o) {
  activate(a, o);
  with_type(a.y_dtype, [&](auto y) {
    with_type(a.residual_dtype, [&](auto residual) { write_tile<decltype(residual), decltype(y)>(a, o); });
  });
}

constexpr LinearEpilogue linear_epilogue_table = {turn, finish, pack_output};

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
