// How keys meet queries and weights meet values: by float32 multiply-add, for every cache type.
//
// A kernel is written against such a class. Its matrix operands are made of elements of 32 bits: here a number, in
// DotMath (attention_avx512bf16.cpp) a pair of bfloat16 numbers that lie behind each other along the summed dimension.
#pragma once
#include "attention_rows.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

template <class T>
struct FloatMath {
  typedef T Cache;
  static constexpr int PER_ELEMENT = 1;

  INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // W elements of consecutive dimensions; the second form reads n dimensions and fills up with zeros.
  INLINE Vec elements(const T* p) { return load(p); }
  INLINE Vec elements(const T* p, int n) { return load(p, n); }

  // `size` query dimensions as elements, zeros up to a multiple of W.
  INLINE void pack_query(float* out, const void* query, DType dtype, int64_t at, int size) {
    with_type(dtype, [&](auto number) {
      const auto* from = (const decltype(number)*)query + at;
      for (int d = 0; d < size; d += W) store(out + d, load(from + d, size - d));
    });
  }

  // The j-th vector of a row's weights and the next one, in place.
  INLINE void store_weights(float* row, int j, Vec x, Vec next) {
    store(row + j * W, x);
    store(row + (j + 1) * W, next);
  }

  // Values of PER_ELEMENT keys as elements of W columns each, zeros beyond `size` columns; null: zeros.
  INLINE void pack_values(float* out, const T* const* values, int size) {
    const T* from = values[0];
    int d = 0;
    for (; from && d + W <= size; d += W) store(out + d, load(from + d));
    for (; d < size; d += W) store(out + d, from ? load(from + d, size - d) : zero());
  }
};

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
