// linear.h for bf16 weights with the bf16 dot product: a vector holds two neighbouring k of 16 tokens (many) or 32
// neighbouring k (few). Activations are rounded to bf16, as the model itself has them; sums are float32.
#include "vec_avx512.h"

#include "linear.h"
#include "with_type.h"

namespace hf_paged {
namespace avx512 {
namespace {

// Rows of a step: as many sums as the registers hold, but no more row pointers than there are registers for them.
constexpr int rows_of(int vectors) { return vectors == 4 ? 6 : 8; }

constexpr int PREFETCH_BYTES = 4096;  // ahead of a stream
constexpr int PAIRS = 16;  // pairs of k in a cache line of weights

INLINE __m512i rounded_pairs(Vec first, Vec second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// 32 numbers of a row as pairs: already that in memory if they are bf16.
INLINE Vec pairs_of(const bf16* p) { return _mm512_loadu_ps(p); }

template <class T>
INLINE Vec pairs_of(const T* p) {
  return _mm512_castsi512_ps(rounded_pairs(load(p), load(p + W)));
}

template <class T>
INLINE Vec pairs_of(const T* p, int64_t left) {
  const Vec low = load(p, left < W ? (int)left : W), high = left > W ? load(p + W, (int)(left - W)) : zero();
  return _mm512_castsi512_ps(rounded_pairs(low, high));
}

template <class T>
INLINE void pack_tokens(const PackArgs& a) {
  uint32_t* out = (uint32_t*)a.out;
  const T* x = (const T*)a.x + a.first * a.x_stride;
  for (int64_t k = 0; k < a.k; k += 2 * W) {
    Vec r[W];
    const int64_t left = a.k - k;
    for (int i = 0; i < W; i++) {
      const T* p = x + i * a.x_stride + k;
      r[i] = i >= a.count ? zero() : left >= 2 * W ? pairs_of(p) : pairs_of(p, left);
    }
    transpose(r);  // row i: pair i of each token
    const int64_t num_pairs = (left + 1) / 2;
    for (int i = 0; i < W && i < num_pairs; i++) store((float*)(out + (k / 2 + i) * a.width), r[i]);
  }
}

template <class T>
INLINE void copy_rows(const PackArgs& a) {
  for (int64_t i = 0; i < a.count; i++) {
    const T* x = (const T*)a.x + (a.first + i) * a.x_stride;
    bf16* out = (bf16*)a.out + i * a.width;
    for (int64_t k = 0; k < a.width; k += W) {
      const Vec v = k < a.k ? load(x + k, (int)(a.k - k < W ? a.k - k : W)) : zero();
      _mm256_storeu_si256((__m256i*)(out + k), (__m256i)_mm512_cvtneps_pbh(v));
    }
  }
}

void pack(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { pack_tokens<decltype(x)>(a); });
}

void copy(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { copy_rows<decltype(x)>(a); });
}

INLINE Vec dot(Vec acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

INLINE __m512i pair_of(const bf16* row) {
  int32_t pair;
  memcpy(&pair, row, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

template <int ROWS, int VECS>
INLINE void multiply(const bf16* const* rows, const uint32_t* x, int64_t width, int64_t first, int64_t last,
                     Vec acc[ROWS][VECS]) {
  x += first * width;
  for (int64_t i = first; i < last; i++, x += width) {
    __m512i v[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) v[j] = _mm512_loadu_si512(x + j * W);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
      const __m512i w = pair_of(rows[r] + 2 * i);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j++) acc[r][j] = dot(acc[r][j], w, v[j]);
    }
  }
}

template <int ROWS, int VECS>
INLINE void step_many(const LinearTile& t, int first_row) {
  const bf16* rows[ROWS];
  const char* next[ROWS];
  for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r, last = t.num_rows - 1;
    rows[r] = (const bf16*)t.rows[row < last ? row : last];
    next[r] = (const char*)(row + ROWS <= last ? (const bf16*)t.rows[row + ROWS] : rows[r] + ROWS * t.k);
  }
  Vec acc[ROWS][VECS];
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) acc[r][j] = zero();
  const uint32_t* x = (const uint32_t*)t.x;
  const int64_t num_pairs = t.k / 2;
  int64_t i = 0;
  for (; i + PAIRS <= num_pairs; i += PAIRS) {
    for (int r = 0; r < ROWS; r++) _mm_prefetch(next[r] + i * 4, _MM_HINT_T1);
    multiply<ROWS, VECS>(rows, x, t.num_tokens, i, i + PAIRS, acc);
  }
  multiply<ROWS, VECS>(rows, x, t.num_tokens, i, num_pairs, acc);
  if (t.k & 1) {  // the last k without a partner: its row may end where the memory does
    for (int r = 0; r < ROWS; r++) {
      const __m512i w = _mm512_set1_epi32(rows[r][t.k - 1].bits);
      for (int j = 0; j < VECS; j++) acc[r][j] = dot(acc[r][j], w, _mm512_loadu_si512(x + num_pairs * t.num_tokens + j * W));
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) store(t.out + (first_row + r) * MAX_WIDTH + j * W, acc[r][j]);
}

template <int VECS>
void many_of(const LinearTile& t) {
  for (int row = 0; row < t.num_rows; row += rows_of(VECS)) step_many<rows_of(VECS), VECS>(t, row);
}

void many(const LinearTile& t) {
  switch (t.num_tokens / W) {
    case 1: return many_of<1>(t);
    case 2: return many_of<2>(t);
    case 3: return many_of<3>(t);
    default: return many_of<4>(t);
  }
}

template <int ROWS, int TOKENS>
INLINE void step_few(const LinearTile& t, int first_row, int first_token) {
  const bf16 *rows[ROWS], *x[TOKENS];
  const char* next[ROWS];  // the rows after these, on their way while these are read
  for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r, last = t.num_rows - 1;
    rows[r] = (const bf16*)t.rows[row < last ? row : last];
    next[r] = (const char*)(row + ROWS <= last ? (const bf16*)t.rows[row + ROWS] : rows[r] + ROWS * t.k);
  }
  for (int m = 0; m < TOKENS; m++)
    x[m] = (const bf16*)t.x + (first_token + m < t.num_tokens ? first_token + m : t.num_tokens - 1) * t.x_stride;
  Vec acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) acc[i] = zero();
  int64_t k = 0;
  for (; k + 2 * W <= t.k; k += 2 * W) {
    __m512i v[TOKENS];
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++) v[m] = _mm512_loadu_si512(x[m] + k);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const __m512i w = _mm512_loadu_si512(rows[r] + k);
      _mm_prefetch(next[r] + 2 * k, _MM_HINT_T1);
#pragma GCC unroll 4
      for (int m = 0; m < TOKENS; m++) acc[m * ROWS + r] = dot(acc[m * ROWS + r], w, v[m]);
    }
  }
  if (k < t.k) {
    const __mmask32 left = (__mmask32)((1ull << (t.k - k)) - 1);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const __m512i w = _mm512_maskz_loadu_epi16(left, rows[r] + k);
#pragma GCC unroll 4
      for (int m = 0; m < TOKENS; m++) acc[m * ROWS + r] = dot(acc[m * ROWS + r], w, _mm512_loadu_si512(x[m] + k));
    }
  }
  alignas(64) float s[W];
  store(s, sums(acc));
  for (int m = 0; m < TOKENS && first_token + m < t.num_tokens; m++)
    for (int r = 0; r < ROWS; r++) t.out[(first_token + m) * COLUMNS + first_row + r] = s[m * ROWS + r];
}

template <int TOKENS>
INLINE void few_of(const LinearTile& t, int first_token) {
  for (int row = 0; row < t.num_rows; row += W / TOKENS) step_few<W / TOKENS, TOKENS>(t, row, first_token);
}

// One token is bound by memory alone: rows one after the other, as they lie there.
INLINE Vec row_times(const bf16* row, const bf16* x, int64_t size) {
  constexpr int PHASES = 4;  // sums that do not wait for each other
  Vec acc[PHASES] = {zero(), zero(), zero(), zero()};
  int64_t k = 0;
  const auto step = [&](Vec sum) {
    const __m512i w = _mm512_loadu_si512(row + k);
    _mm_prefetch((const char*)(row + k) + PREFETCH_BYTES, _MM_HINT_T1);
    sum = dot(sum, w, _mm512_loadu_si512(x + k));
    k += 2 * W;
    return sum;
  };
  while (k + 2 * W * PHASES <= size)
    for (int p = 0; p < PHASES; p++) acc[p] = step(acc[p]);
  while (k + 2 * W <= size) acc[0] = step(acc[0]);
  if (k < size) {
    const __mmask32 left = (__mmask32)((1ull << (size - k)) - 1);
    acc[0] = dot(acc[0], _mm512_maskz_loadu_epi16(left, row + k), _mm512_loadu_si512(x + k));
  }
  return add(add(acc[0], acc[1]), add(acc[2], acc[3]));
}

void one(const LinearTile& t) {
  for (int first = 0; first < t.num_rows; first += W) {
    Vec products[W];
    for (int i = 0; i < W; i++) {
      const int row = first + i < t.num_rows ? first + i : t.num_rows - 1;
      products[i] = row_times((const bf16*)t.rows[row], (const bf16*)t.x, t.k);
    }
    store(t.out + first, sums(products));
  }
}

void few(const LinearTile& t) {
  if (t.num_tokens == 1) return one(t);
  if (t.num_tokens == 2) return few_of<2>(t, 0);
  for (int m = 0; m < t.num_tokens; m += FEW_TOKENS) few_of<FEW_TOKENS>(t, m);
}

}  // namespace
}  // namespace avx512

extern const LinearKernels linear_avx512bf16 = {
    avx512::W, 64, 8, true, avx512::pack, avx512::copy, {nullptr, avx512::many},
    {nullptr, avx512::few}, {}, 0};

}  // namespace hf_paged
