// Activation functions in float32, written once for all instruction sets; include it after vec_*.h.
//
// `activate<A>(x)` is for epilogues of other kernels. Relative errors stay below 1e-6 over the whole range (but where a
// result is denormal), so the tails of gelu are exact where torch's own cancel; NaN stays NaN and infinities give what
// torch gives: f(inf) = inf, and NaN at -inf where the formula is -inf * 0.
#pragma once
#include "activation.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// x limited to -limit ... limit. The order of the arguments keeps a NaN (the processor returns the second one).
INLINE Vec clamp(Vec x, float limit) { return min(set(limit), max(set(-limit), x)); }

// A number of more than 24 bits: high + low.
struct Sum {
  Vec high, low;
};

// x split as n * ln 2 + rest, n whole and rest from -0.35 to 0.35.
struct Powers {
  Vec n, rest;
};

INLINE Powers split(Sum x) {
  const Vec n = round_even(mul(x.high, set(1.44269504f)));
  const Vec rest = fma(n, set(-0.693147182f), x.high);
  return {n, add(fma(n, set(1.90465421e-9f), rest), x.low)};
}

// (e ** x - 1) / x for x from -0.35 to 0.35: its Taylor series.
INLINE Vec expm1_over_x(Vec x) {
  Vec p = set(1.f / 5040);
  p = fma(p, x, set(1.f / 720));
  p = fma(p, x, set(1.f / 120));
  p = fma(p, x, set(1.f / 24));
  p = fma(p, x, set(1.f / 6));
  p = fma(p, x, set(0.5f));
  return fma(p, x, set(1.f));
}

// e ** x: infinity above 88.7, denormal numbers below -87.3, zero below -104.
INLINE Vec exponential(Sum x) {
  const Powers p = split({clamp(x.high, 104.f), x.low});
  return scale_by_power(fma(expm1_over_x(p.rest), p.rest, set(1.f)), p.n);
}

INLINE Vec negative(Vec x) { return sub(zero(), x); }

// 1 + e ** -x
INLINE Vec one_plus_exponential_of_negative(Sum x) {
  return add(set(1.f), exponential({negative(x.high), negative(x.low)}));
}

INLINE Vec silu(Vec x) { return div(x, one_plus_exponential_of_negative({x, zero()})); }

INLINE Vec sigmoid(Vec x) { return div(set(1.f), one_plus_exponential_of_negative({x, zero()})); }

// x * sigmoid(1.702 x); the product is kept exact, since its error would be the exponential's relative error.
INLINE Vec quick_gelu(Vec x) {
  const Vec z = clamp(x, 100.f), high = mul(z, set(1.70200002f));
  const Vec low = fma(z, set(-2.19345093e-8f), fma(z, set(1.70200002f), negative(high)));
  return div(x, one_plus_exponential_of_negative({high, low}));
}

// x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with 2u = 2 sqrt(2 / pi) (x + 0.044715 x**3) = x (k + c x**2), kept exact.
INLINE Vec gelu_tanh(Vec x) {
  const Vec k = set(1.59576917f), c = set(0.0713548139f), c_low = set(2.39883247e-9f), k_low = set(-4.53406805e-8f);
  const Vec z = clamp(x, 20.f);
  const Vec square = mul(z, z), square_low = fma(z, z, negative(square));
  const Vec factor = fma(c, square, k), factor_low = add(fma(c, square, negative(factor)), k);
  const Vec rest = add(add(factor_low, k_low), fma(c_low, square, mul(c, square_low)));
  const Vec high = mul(z, factor), low = fma(z, rest, fma(z, factor, negative(high)));
  return div(x, one_plus_exponential_of_negative({high, low}));
}

// The normal distribution's tail beyond a >= 0: e ** (-a**2 / 2) * t q(t), t = 1 / (1 + 0.35 a). The polynomial was
// fitted to that function's relative error (3e-8, least squares reweighted towards the largest error).
INLINE Vec normal_tail(Vec a) {
  const Vec t = div(set(1.f), fma(a, set(0.35f), set(1.f)));
  Vec q = set(-0.0291639331f);
  q = fma(q, t, set(0.144060837f));
  q = fma(q, t, set(-0.255901933f));
  q = fma(q, t, set(0.159392989f));
  q = fma(q, t, set(-0.0232638867f));
  q = fma(q, t, set(0.105574822f));
  q = fma(q, t, set(0.119815493f));
  q = fma(q, t, set(0.139864337f));
  q = fma(q, t, set(0.139621258f));
  const Vec square = mul(a, a), square_low = fma(a, a, negative(square));
  return mul(mul(t, q), exponential({mul(square, set(-0.5f)), mul(square_low, set(-0.5f))}));
}

// x times the normal distribution function.
INLINE Vec gelu(Vec x) {
  const Vec z = clamp(x, 20.f), tail = normal_tail(max(negative(z), z));
  return mul(x, select_negative(x, tail, sub(set(1.f), tail)));
}

// (e ** 2x - 1) / (e ** 2x + 1), where e ** 2x - 1 is formed without cancellation.
INLINE Vec tanh(Vec x) {
  const Powers p = split({clamp(add(x, x), 30.f), zero()});
  const Vec power = scale_by_power(set(1.f), p.n);
  const Vec expm1 = fma(power, mul(expm1_over_x(p.rest), p.rest), sub(power, set(1.f)));
  return div(expm1, add(expm1, set(2.f)));
}

INLINE Vec relu(Vec x) { return max(zero(), x); }  // max(0, NaN) is NaN in this order

template <Activation A>
INLINE Vec activate(Vec x) {
  if (A == Activation::silu) return silu(x);
  if (A == Activation::gelu) return gelu(x);
  if (A == Activation::gelu_tanh) return gelu_tanh(x);
  if (A == Activation::quick_gelu) return quick_gelu(x);
  if (A == Activation::relu) return relu(x);
  if (A == Activation::relu2) return mul(relu(x), relu(x));
  if (A == Activation::sigmoid) return sigmoid(x);
  if (A == Activation::tanh) return tanh(x);
  return x;
}

// An activation as a type: of what is handed to `use`, `decltype(choice)::value` is a constant.
template <Activation A>
struct Choice {
  static constexpr Activation value = A;
};

template <class Use>
INLINE void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::identity: return use(Choice<Activation::identity>());
    case Activation::silu: return use(Choice<Activation::silu>());
    case Activation::gelu: return use(Choice<Activation::gelu>());
    case Activation::gelu_tanh: return use(Choice<Activation::gelu_tanh>());
    case Activation::quick_gelu: return use(Choice<Activation::quick_gelu>());
    case Activation::relu: return use(Choice<Activation::relu>());
    case Activation::relu2: return use(Choice<Activation::relu2>());
    case Activation::sigmoid: return use(Choice<Activation::sigmoid>());
    case Activation::tanh: return use(Choice<Activation::tanh>());
  }
}

template <Activation A, class T>
static void activate_row(const T* gate, const T* up, T* y, int64_t size) {
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const Vec x = activate<A>(load(gate + i));
    store(y + i, up ? mul(x, load(up + i)) : x);
  }
  const int rest = (int)(size - i);
  if (!rest) return;
  const Vec x = activate<A>(load(gate + i, rest));
  store(y + i, up ? mul(x, load(up + i, rest)) : x, rest);
}

template <Activation A>
static void activate_rows(const ActivationArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto number) {
    typedef decltype(number) T;
    for (int64_t row = begin; row < end; row++) {
      activate_row<A>((const T*)args.gate + row * args.gate_stride,
                      args.up ? (const T*)args.up + row * args.up_stride : nullptr, (T*)args.y + row * args.y_stride,
                      args.size);
    }
  });
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
