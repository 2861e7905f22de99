// From a tile of sums to y: bias, activation, gate times up, residual, rounding.
#pragma once
#include "activation_kernels.h"
#include "linear.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

INLINE Vec load_as(DType dtype, const void* p, int64_t i, int n) {
  if (dtype == DType::f32) return load((const float*)p + i, n);
  if (dtype == DType::bf16) return load((const bf16*)p + i, n);
  return load((const f16*)p + i, n);
}

INLINE void store_as(DType dtype, void* p, int64_t i, Vec x, int n) {
  if (dtype == DType::f32) store((float*)p + i, x, n);
  else if (dtype == DType::bf16) store((bf16*)p + i, x, n);
  else store((f16*)p + i, x, n);
}

template <Activation A, bool GATED>
static void finish_as(const LinearArgs& a, const LinearOutput& o) {
  for (int64_t m = 0; m < o.num_tokens; m++) {
    const int64_t token = o.first_token + m;
    for (int n = 0; n < o.num_columns; n += W) {
      const int count = o.num_columns - n < W ? o.num_columns - n : W;
      Vec x = load(o.tile + m * COLUMNS + n);
      if (o.bias) x = add(x, load(o.bias + n));
      x = activate<A>(x);
      if (GATED) {
        Vec up = load(o.up_tile + m * COLUMNS + n);
        if (o.up_bias) up = add(up, load(o.up_bias + n));
        x = mul(x, up);
      }
      const int64_t column = o.first_column + n;
      if (a.residual) {
        const Vec r = load_as(a.residual_dtype, a.residual, token * a.residual_stride + column, count);
        x = fma(x, set(a.residual_scale), r);
      }
      store_as(a.y_dtype, a.y, token * a.y_stride + column, x, count);
    }
  }
}

template <Activation A>
INLINE void finish_with(const LinearArgs& a, const LinearOutput& o) {
  if (a.gated) finish_as<A, true>(a, o);
  else finish_as<A, false>(a, o);
}

static void finish(const LinearArgs& a, const LinearOutput& o) {
  switch (a.activation) {
    case Activation::identity: return finish_with<Activation::identity>(a, o);
    case Activation::silu: return finish_with<Activation::silu>(a, o);
    case Activation::gelu: return finish_with<Activation::gelu>(a, o);
    case Activation::gelu_tanh: return finish_with<Activation::gelu_tanh>(a, o);
    case Activation::quick_gelu: return finish_with<Activation::quick_gelu>(a, o);
    case Activation::relu: return finish_with<Activation::relu>(a, o);
    case Activation::relu2: return finish_with<Activation::relu2>(a, o);
    case Activation::sigmoid: return finish_with<Activation::sigmoid>(a, o);
    case Activation::tanh: return finish_with<Activation::tanh>(a, o);
  }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
