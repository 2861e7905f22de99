// Rows of packed codes, as kernels/packed_rows.py describes them, in float32; written against vec_avx512.h or vec_avx2.h.
//
//   | float32 scale | float32 zero | codes of a group | scale | zero | codes | ...      number = (code - zero) * scale
#pragma once
#include "dtype.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

template <class T>
constexpr bool is_packed_row = false;
template <>
constexpr bool is_packed_row<q4> = true;
template <>
constexpr bool is_packed_row<q8> = true;
template <>
constexpr bool is_packed_row<e4m3> = true;

constexpr int CHUNK_CODES = 32;  // groups consist of whole chunks
constexpr int CHUNK_VECS = CHUNK_CODES / W;

template <class T>
struct Packed {
  static constexpr int CHUNK_BYTES = 32;
  static constexpr float UNIT = 1;  // what a loaded code of 1 stands for
  static constexpr bool HAS_ZERO = true;
};
template <>
struct Packed<q4> : Packed<void> {
  static constexpr int CHUNK_BYTES = 16;
};
template <>
struct Packed<e4m3> : Packed<void> {
  static constexpr float UNIT = 256;
  static constexpr bool HAS_ZERO = false;
};

template <class T>
INLINE void load_chunk(const T* p, Vec out[CHUNK_VECS]) {
#pragma GCC unroll 4
  for (int i = 0; i < CHUNK_VECS; i++) out[i] = load(p + i * W);
}

// What stands before a group's codes.
struct GroupHead {
  float scale, zero;
};
INLINE GroupHead head_of(const void* row) {
  GroupHead head;
  memcpy(&head, row, sizeof(head));
  return head;
}

// A row as `size` float32 numbers, a multiple of the group.
template <class T>
INLINE void unpack_row(const T* row, int64_t size, int64_t group, float* to) {
  for (int64_t begin = 0; begin < size; begin += group) {
    const GroupHead head = head_of(row);
    row += sizeof(head);
    const Vec scale = set(head.scale * Packed<T>::UNIT), shift = set(-head.zero * head.scale);
    for (int64_t k = begin; k < begin + group; k += CHUNK_CODES, row += Packed<T>::CHUNK_BYTES) {
      Vec codes[CHUNK_VECS];
      load_chunk(row, codes);
#pragma GCC unroll 4
      for (int i = 0; i < CHUNK_VECS; i++)
        store(to + k + i * W, Packed<T>::HAS_ZERO ? fma(codes[i], scale, shift) : mul(codes[i], scale));
    }
  }
}

// The product of a row with x: W sums, and in `rest` what the zeros take off. `x_sums` are those of x, group by group.
template <class T>
INLINE Vec packed_row_times(const T* row, const float* x, int64_t size, int64_t group, const float* x_sums, float& rest) {
  constexpr int PREFETCH_BYTES = 2048;
  Vec total = zero();
  rest = 0;
  for (int64_t begin = 0; begin < size; begin += group, x_sums++) {
    const GroupHead head = head_of(row);
    row += sizeof(head);
    Vec acc[CHUNK_VECS];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK_VECS; i++) acc[i] = zero();
    for (int64_t k = begin; k < begin + group; k += CHUNK_CODES, row += Packed<T>::CHUNK_BYTES) {
      Vec codes[CHUNK_VECS];
      _mm_prefetch((const char*)row + PREFETCH_BYTES, _MM_HINT_T0);
      load_chunk(row, codes);
#pragma GCC unroll 4
      for (int i = 0; i < CHUNK_VECS; i++) acc[i] = fma(codes[i], load(x + k + i * W), acc[i]);
    }
    Vec sum = add(acc[0], acc[1]);
    if constexpr (CHUNK_VECS == 4) sum = add(sum, add(acc[2], acc[3]));
    total = fma(sum, set(head.scale * Packed<T>::UNIT), total);
    if constexpr (Packed<T>::HAS_ZERO) rest -= head.scale * head.zero * *x_sums;
  }
  return total;
}

// out[row] = row . x, with `scratch` for a number per group; x is zero beyond its end.
template <class T>
INLINE void one_token(const T* const* rows, int num_rows, const float* x, int64_t size, int64_t group, float* scratch,
                      float* out) {
  for (int64_t begin = 0; Packed<T>::HAS_ZERO && begin < size; begin += group) {
    Vec sums = zero();
    for (int64_t k = begin; k < begin + group; k += W) sums = add(sums, load(x + k));
    scratch[begin / group] = sum(sums);
  }
  for (int first = 0; first < num_rows; first += W) {
    Vec products[W];
    alignas(64) float rests[W];
    for (int i = 0; i < W; i++) {
      const int row = first + i < num_rows ? first + i : num_rows - 1;
      products[i] = packed_row_times(rows[row], x, size, group, scratch, rests[i]);
    }
    store(out + first, add(sums(products), load(rests)));
  }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
