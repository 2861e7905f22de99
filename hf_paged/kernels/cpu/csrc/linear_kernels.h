// float32 arithmetic of linear.h for any weight dtype, written against vec_avx512.h or vec_avx2.h.
#pragma once
#include "linear.h"
#include "packed_rows.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

// Rows of a step: as many sums as the registers hold, but no more row pointers than there are registers for them.
constexpr int rows_of(int vectors) {
  if (W == 16) return vectors == 4 ? 6 : 8;
  return vectors == 2 ? 6 : 8;
}


template <class T>
INLINE void load_tokens(const T* x, int64_t stride, int count, Vec r[W]) {
  for (int i = 0; i < W; i++) r[i] = i < count ? load(x + i * stride) : zero();
}

template <class T>
INLINE void load_tokens(const T* x, int64_t stride, int count, int num_k, Vec r[W]) {
  for (int i = 0; i < W; i++) r[i] = i < count ? load(x + i * stride, num_k) : zero();
}

template <class T>
INLINE void pack_tokens(const PackArgs& a) {
  float* out = (float*)a.out;
  const T* x = (const T*)a.x + a.first * a.x_stride;
  for (int64_t k = 0; k < a.k; k += W) {
    Vec r[W];
    const int num_k = a.k - k < W ? (int)(a.k - k) : W;
    if (num_k == W) load_tokens(x + k, a.x_stride, (int)a.count, r);
    else load_tokens(x + k, a.x_stride, (int)a.count, num_k, r);
    transpose(r);
    for (int i = 0; i < num_k; i++) store(out + (k + i) * a.width, r[i]);
  }
}

template <class T>
INLINE void copy_rows(const PackArgs& a) {
  for (int64_t i = 0; i < a.count; i++) {
    const T* x = (const T*)a.x + (a.first + i) * a.x_stride;
    float* out = (float*)a.out + i * a.width;
    for (int64_t k = 0; k < a.width; k += W) store(out + k, k < a.k ? load(x + k, (int)(a.k - k < W ? a.k - k : W)) : zero());
  }
}

static void pack(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { pack_tokens<decltype(x)>(a); });
}

static void copy(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { copy_rows<decltype(x)>(a); });
}

// Products are summed in chunks along k, and the chunks added up: rounding errors grow with the length of a sum.
constexpr int64_t CHUNK = 96;

// ROWS weight rows (float32) x VECS vectors of tokens, k from `first` on.
template <int ROWS, int VECS>
INLINE void multiply(const float* const* rows, const float* x, int64_t width, int64_t first, int64_t end,
                     Vec acc[ROWS][VECS]) {
  x += first * width;
  for (int64_t i = first; i < end; i++, x += width) {
    Vec v[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) v[j] = load(x + j * W);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
      const Vec w = set(rows[r][i]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j++) acc[r][j] = fma(w, v[j], acc[r][j]);
    }
  }
}

INLINE int64_t padded(int64_t k) { return (k + 31) / 32 * 32; }

template <class T>
INLINE void widen_row(const T* from, const LinearTile& t, float* to) {
  if constexpr (is_packed_row<T>) return unpack_row(from, padded(t.k), t.group, to);
  else {
    int64_t k = 0;
    for (; k + W <= t.k; k += W) store(to + k, load(from + k));
    if (k < t.k) store(to + k, load(from + k, (int)(t.k - k)), (int)(t.k - k));
  }
}

// A step of ROWS rows: widened to float32 into `wide`, and multiplied.
template <class T, int ROWS, int VECS>
INLINE void step_many(const LinearTile& t, int first_row, float* wide) {
  const float* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r < t.num_rows ? first_row + r : t.num_rows - 1;
    const T* from = (const T*)t.rows[row];
    if (sizeof(T) == sizeof(float)) {
      rows[r] = (const float*)from;
      continue;
    }
    float* to = wide + r * padded(t.k);
    rows[r] = to;
    widen_row(from, t, to);
  }
  int64_t first = 0;
  do {  // once even where k is 0
    Vec acc[ROWS][VECS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j++) acc[r][j] = zero();
    const int64_t end = first + CHUNK < t.k ? first + CHUNK : t.k;
    multiply<ROWS, VECS>(rows, (const float*)t.x, t.num_tokens, first, end, acc);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j++) {
        float* sum = t.out + (first_row + r) * MAX_WIDTH + j * W;
        store(sum, first ? add(load(sum), acc[r][j]) : acc[r][j]);
      }
    first += CHUNK;
  } while (first < t.k);
}

template <class T, int VECS>
static void many_of(const LinearTile& t) {
  constexpr int ROWS = rows_of(VECS);
  for (int row = 0; row < t.num_rows; row += ROWS) step_many<T, ROWS, VECS>(t, row, (float*)t.scratch);
}

template <class T>
static void many(const LinearTile& t) {
  switch (t.num_tokens / W) {
    case 1: return many_of<T, 1>(t);
    case 2: return many_of<T, 2>(t);
    case 3: return many_of<T, 3>(t);
    default: return many_of<T, 4>(t);
  }
}

// ROWS rows x TOKENS tokens along k; W sums, stored to out[token][row].
template <class T, int ROWS, int TOKENS>
INLINE void step_few(const LinearTile& t, int first_row, int first_token) {
  const T* rows[ROWS];
  const float* x[TOKENS];
  const char* next[ROWS];  // the rows after these, on their way while these are read
  for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r, last = t.num_rows - 1;
    rows[r] = (const T*)t.rows[row < last ? row : last];
    next[r] = (const char*)(row + ROWS <= last ? (const T*)t.rows[row + ROWS] : rows[r] + ROWS * t.k);
  }
  for (int m = 0; m < TOKENS; m++)
    x[m] = (const float*)t.x + (first_token + m < t.num_tokens ? first_token + m : t.num_tokens - 1) * t.x_stride;
  Vec acc[TOKENS * ROWS];
#pragma GCC unroll 24
  for (int i = 0; i < TOKENS * ROWS; i++) acc[i] = zero();
  int64_t k = 0;
  for (; k + W <= t.k; k += W) {
    Vec v[TOKENS];
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++) v[m] = load(x[m] + k);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
      const Vec w = load(rows[r] + k);
      _mm_prefetch(next[r] + k * (int64_t)sizeof(T), _MM_HINT_T1);
#pragma GCC unroll 4
      for (int m = 0; m < TOKENS; m++) acc[m * ROWS + r] = fma(w, v[m], acc[m * ROWS + r]);
    }
  }
  if (k < t.k) {
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
      const Vec w = load(rows[r] + k, (int)(t.k - k));
#pragma GCC unroll 4
      for (int m = 0; m < TOKENS; m++) acc[m * ROWS + r] = fma(w, load(x[m] + k), acc[m * ROWS + r]);
    }
  }
  alignas(64) float s[TOKENS * ROWS];
  for (int i = 0; i < TOKENS * ROWS; i += W) store(s + i, sums(acc + i));
  for (int m = 0; m < TOKENS && first_token + m < t.num_tokens; m++)
    for (int r = 0; r < ROWS; r++) t.out[(first_token + m) * COLUMNS + first_row + r] = s[m * ROWS + r];
}

template <class T, int TOKENS>
INLINE void few_of(const LinearTile& t, int first_token) {
  constexpr int ROWS = W / TOKENS;
  for (int row = 0; row < t.num_rows; row += ROWS) step_few<T, ROWS, TOKENS>(t, row, first_token);
}

// One token is bound by memory alone: rows one after the other, as they lie there.
template <class T>
INLINE Vec row_times(const T* row, const float* x, int64_t size) {
  constexpr int PHASES = 4;  // sums that do not wait for each other
  constexpr int PREFETCH_BYTES = 4096;
  Vec acc[PHASES] = {zero(), zero(), zero(), zero()};
  int64_t k = 0;
  const auto step = [&](Vec sum) {
    _mm_prefetch((const char*)(row + k) + PREFETCH_BYTES, _MM_HINT_T1);
    sum = fma(load(row + k), load(x + k), sum);
    k += W;
    return sum;
  };
  while (k + W * PHASES <= size)
    for (int p = 0; p < PHASES; p++) acc[p] = step(acc[p]);
  while (k + W <= size) acc[0] = step(acc[0]);
  if (k < size) acc[0] = fma(load(row + k, (int)(size - k)), load(x + k), acc[0]);
  return add(add(acc[0], acc[1]), add(acc[2], acc[3]));
}

template <class T>
static void one(const LinearTile& t) {
  for (int first = 0; first < t.num_rows; first += W) {
    Vec products[W];
    for (int i = 0; i < W; i++) {
      const int row = first + i < t.num_rows ? first + i : t.num_rows - 1;
      products[i] = row_times((const T*)t.rows[row], (const float*)t.x, t.k);
    }
    store(t.out + first, sums(products));
  }
}

template <class T>
static void few(const LinearTile& t) {
  if (t.num_tokens == 1) return one<T>(t);
  if (t.num_tokens == 2) return few_of<T, 2>(t, 0);
  for (int m = 0; m < t.num_tokens; m += FEW_TOKENS) few_of<T, FEW_TOKENS>(t, m);
}

// Packed rows, for one token as they are, for more of them widened W at a time.
template <class T>
static void few_packed(const LinearTile& t) {
  float* wide = (float*)t.scratch;
  if (t.num_tokens == 1) return one_token((const T* const*)t.rows, t.num_rows, (const float*)t.x, padded(t.k), t.group, wide, t.out);
  const void* rows[W];
  for (int first = 0; first < t.num_rows; first += W) {
    LinearTile some = t;
    some.rows = rows;
    some.num_rows = t.num_rows - first < W ? t.num_rows - first : W;
    some.out = t.out + first;
    for (int r = 0; r < some.num_rows; r++) {
      rows[r] = wide + r * padded(t.k);
      widen_row((const T*)t.rows[first + r], t, wide + r * padded(t.k));
    }
    few<float>(some);
  }
}

template <class T>
static void widen(const LinearTile& t) {
  for (int row = 0; row < t.num_rows; row++) widen_row((const T*)t.rows[row], t, (float*)t.scratch + row * padded(t.k));
}

constexpr LinearKernels linear_table(int max_width) {
  return {W, max_width, W / 2, false, pack, copy,
          {many<float>, many<bf16>, many<f16>, many<q4>, many<q8>, many<e4m3>},
          {few<float>, few<bf16>, few<f16>, few_packed<q4>, few_packed<q8>, few_packed<e4m3>},
          {nullptr, nullptr, nullptr, widen<q4>, widen<q8>, widen<e4m3>},
          0};
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
