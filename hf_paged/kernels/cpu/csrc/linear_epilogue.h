// From a tile of sums to y: bias, activation, gate times up, residual, rounding.
#pragma once
#include "activation_kernels.h"
#include "linear.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

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

template <Activation A>
INLINE void activate_with(const LinearArgs& a, const LinearOutput& o) {
  if (a.gated) activate_tile<A, true>(o);
  else activate_tile<A, false>(o);
}

INLINE void activate(const LinearArgs& a, const LinearOutput& o) {
  switch (a.activation) {
    case Activation::identity:
      if (a.gated || o.bias) activate_with<Activation::identity>(a, o);
      return;
    case Activation::silu: return activate_with<Activation::silu>(a, o);
    case Activation::gelu: return activate_with<Activation::gelu>(a, o);
    case Activation::gelu_tanh: return activate_with<Activation::gelu_tanh>(a, o);
    case Activation::quick_gelu: return activate_with<Activation::quick_gelu>(a, o);
    case Activation::relu: return activate_with<Activation::relu>(a, o);
    case Activation::relu2: return activate_with<Activation::relu2>(a, o);
    case Activation::sigmoid: return activate_with<Activation::sigmoid>(a, o);
    case Activation::tanh: return activate_with<Activation::tanh>(a, o);
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

static void finish(const LinearArgs& a, const LinearOutput& o) {
  activate(a, o);
  with_type(a.y_dtype, [&](auto y) {
    with_type(a.residual_dtype, [&](auto residual) { write_tile<decltype(residual), decltype(y)>(a, o); });
  });
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
