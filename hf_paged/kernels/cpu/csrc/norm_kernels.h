// RMS norm and layer norm, written once for all instruction sets; include it after vec_*.h.
//
// A row is read for its sum with the residual, for its statistics and to scale it; rows are small enough to lie in the
// first-level cache after the first time.
#pragma once
#include "norm.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// What turns a row into its norm: y = ((x - shift) * scale + offset) * weight + bias.
struct RowScale {
  float shift, scale, offset;
};

template <class T>
INLINE const T* row_of(const void* data, int64_t outer_stride, int64_t stride, int64_t inner, int64_t row) {
  return (const T*)data + (row / inner) * outer_stride + (row % inner) * stride;
}

// sum = x + residual, rounded to the dtype of the sum.
template <class X, class S>
static void add_row(const X* x, const S* residual, S* to, int64_t size) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(to + i, add(load(x + i), load(residual + i)));
  const int rest = (int)(size - i);
  if (rest) store(to + i, add(load(x + i, rest), load(residual + i, rest)), rest);
}

template <class X>
static float sum_of_squares(const X* x, int64_t size) {
  Vec a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * W <= size; i += 2 * W) {
    const Vec u = load(x + i), v = load(x + i + W);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  for (; i < size; i += W) {
    const Vec u = load(x + i, size - i < W ? (int)(size - i) : W);
    a = fma(u, u, a);
  }
  return sum(add(a, b));
}

template <class X>
static float mean_of(const X* x, int64_t size) {
  Vec a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * W <= size; i += 2 * W) {
    a = add(a, load(x + i));
    b = add(b, load(x + i + W));
  }
  for (; i < size; i += W) a = add(a, load(x + i, size - i < W ? (int)(size - i) : W));
  return sum(add(a, b)) / (float)size;
}

template <class X>
static RowScale rms_scale(const X* x, int64_t size, float eps) {
  return {0.f, 1.f / sqrtf(sum_of_squares(x, size) / (float)size + eps), 0.f};
}

// Two passes, the second one correcting the mean of the first (the deviations from a slightly wrong mean still sum to
// its error): a row of mean 10,000 and deviation 1 comes out as from float64.
template <class X>
static RowScale layer_norm_scale(const X* x, int64_t size, float eps) {
  const float rough = mean_of(x, size);
  const Vec shift = set(rough);
  Vec squares = zero(), deviations = zero();
  int64_t i = 0;
  const auto include = [&](Vec deviation) {
    deviations = add(deviations, deviation);
    squares = fma(deviation, deviation, squares);
  };
  for (; i + W <= size; i += W) include(sub(load(x + i), shift));
  const int rest = (int)(size - i);
  if (rest) include(select_first(rest, sub(load(x + i, rest), shift), zero()));
  const float error = sum(deviations) / (float)size;
  const float variance = sum(squares) / (float)size - error * error;
  const float scale = 1.f / sqrtf(variance + eps);
  return {rough, scale, -error * scale};
}

enum NormKind { RMS, LAYER_NORM };

// y from up to W numbers at x + i; all of them where n is W, which the compiler knows in the main loop.
template <NormKind kind, class X, class Y, class P>
INLINE void scale_some(const NormArgs& args, const RowScale& row, const X* x, Y* y, int64_t i, int n) {
  const P *weight = (const P*)args.weight, *bias = (const P*)args.bias;
  const bool all = n == W;
  Vec v = all ? load(x + i) : load(x + i, n);
  v = kind == RMS ? mul(v, set(row.scale)) : fma(sub(v, set(row.shift)), set(row.scale), set(row.offset));
  if (weight) v = mul(v, add(all ? load(weight + i) : load(weight + i, n), set(args.weight_offset)));
  if (bias) v = add(v, all ? load(bias + i) : load(bias + i, n));
  all ? store(y + i, v) : store(y + i, v, n);
}

template <NormKind kind, class X, class Y, class P>
static void scale_row(const NormArgs& args, RowScale row, const X* x, Y* y) {
  int64_t i = 0;
  for (; i + W <= args.size; i += W) scale_some<kind, X, Y, P>(args, row, x, y, i, W);
  if (i < args.size) scale_some<kind, X, Y, P>(args, row, x, y, i, (int)(args.size - i));
}

template <class S>
static void add_residual(const NormArgs& args, int64_t row) {
  const S* residual = (const S*)args.residual + row * args.residual_stride;
  S* to = (S*)args.sum + row * args.sum_stride;
  with_type(args.x_dtype, [&](auto x) {
    add_row((const decltype(x)*)args.x + row * args.x_outer_stride, residual, to, args.size);
  });
}

// Norms rows whose input has type X: x itself, or the sums just written.
template <NormKind kind, class X>
static void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  void (*scale)(const NormArgs&, RowScale, const X*, void*) = nullptr;
  with_type(args.y_dtype, [&](auto y) {
    with_type(args.weight_dtype, [&](auto p) {
      scale = [](const NormArgs& a, RowScale row, const X* from, void* to) {
        scale_row<kind, X, decltype(y), decltype(p)>(a, row, from, (decltype(y)*)to);
      };
    });
  });
  const int64_t y_size = size_of(args.y_dtype);
  for (int64_t row = begin; row < end; row++) {
    if (args.residual) add_residual<X>(args, row);
    const X* x = args.residual ? (const X*)args.sum + row * args.sum_stride
                               : row_of<X>(args.x, args.x_outer_stride, args.x_stride, args.inner, row);
    const int64_t to = (row / args.inner) * args.y_outer_stride + (row % args.inner) * args.y_stride;
    const RowScale found = kind == RMS ? rms_scale(x, args.size, args.eps) : layer_norm_scale(x, args.size, args.eps);
    scale(args, found, x, (char*)args.y + to * y_size);
  }
}

template <NormKind kind>
static void norm(const NormArgs& args, int64_t begin, int64_t end) {
  with_type(args.residual ? args.residual_dtype : args.x_dtype,
            [&](auto x) { norm_rows<kind, decltype(x)>(args, begin, end); });
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
