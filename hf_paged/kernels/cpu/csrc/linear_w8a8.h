// linear.h for int8 weights and activations that are quantized on their way in, token by token; written against
// vec_avx512.h or vec_avx2.h, and against `Ints` of the file that includes this one.
//
// A unit is what a 32-bit lane multiplies at once: UNIT neighbouring k.
//
//                many    packed x, a block     [units][width] words, then [width] scales, then [width] sums of codes
//                few     rows of x             `row_bytes`: codes, then at `scale_at` the scale and the sum of codes
//
// y = sum of code(weight) * code(x), exact in int32 for k up to 130,000, times both scales. A token's scale is its
// largest absolute number / 127; where x is NaN or infinite, it is NaN, and so is that row of y.
#pragma once
#include "linear.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

constexpr int UNIT = Ints::UNIT;
constexpr int64_t CODE_BYTES = 4 / UNIT;  // of a code of x

INLINE int64_t padded(int64_t k) { return (k + 31) / 32 * 32; }
INLINE int64_t units_of(int64_t k) { return padded(k) / UNIT; }
INLINE int64_t scale_at(int64_t k) { return padded(k) * CODE_BYTES; }

struct TokenScale {
  float scale, codes_per;  // codes_per: its inverse, 0 where all numbers are 0
};

template <class T>
INLINE TokenScale scale_of(const T* x, int64_t size) {
  Vec largest = zero(), probe = zero();
  for (int64_t k = 0; k < size; k += W) {
    const Vec v = k + W <= size ? load(x + k) : load(x + k, (int)(size - k));
    largest = max(largest, max(v, sub(zero(), v)));
    probe = fma(v, zero(), probe);  // NaN where v is not finite
  }
  const float reach = highest(largest), broken = sum(probe);
  return {reach / 127 + broken, reach > 0 ? 127 / reach : 0};
}

// The codes of some k of a token, as W words.
template <class T>
INLINE WordVec words_of(const T* x, int64_t left, float codes_per) {
  Vec numbers[UNIT];
#pragma GCC unroll 4
  for (int i = 0; i < UNIT; i++) {
    const int64_t rest = left - i * W;
    numbers[i] = mul(rest >= W ? load(x + i * W) : rest > 0 ? load(x + i * W, (int)rest) : zero(), set(codes_per));
  }
  return Ints::narrow(numbers);
}

template <class T>
INLINE void pack_tokens(const PackArgs& a) {
  float* out = (float*)a.out;
  const T* x = (const T*)a.x + a.first * a.x_stride;
  const int64_t units = units_of(a.k);
  TokenScale scales[W];
  for (int i = 0; i < W; i++) scales[i] = i < a.count ? scale_of(x + i * a.x_stride, a.k) : TokenScale{0, 0};
  IntVec code_sums = Ints::nothing();
  for (int64_t unit = 0; unit < units; unit += W) {
    Vec r[W];
    for (int i = 0; i < W; i++) {
      const int64_t k = unit * UNIT;
      r[i] = i < a.count ? Ints::as_floats(words_of(x + i * a.x_stride + k, a.k - k, scales[i].codes_per)) : zero();
    }
    transpose(r);  // row i: unit i of each token
    for (int i = 0; i < W && unit + i < units; i++) {
      store(out + (unit + i) * a.width, r[i]);
      code_sums = Ints::add_codes(code_sums, Ints::as_words(r[i]));
    }
  }
  alignas(64) float scale[W];
  for (int i = 0; i < W; i++) scale[i] = scales[i].scale;
  store(out + units * a.width, load(scale));
  store(out + (units + 1) * a.width, Ints::to_floats(code_sums));
}

template <class T>
INLINE void copy_rows(const PackArgs& a) {
  for (int64_t i = 0; i < a.count; i++) {
    const T* x = (const T*)a.x + (a.first + i) * a.x_stride;
    char* out = (char*)a.out + i * a.width;
    const TokenScale scale = scale_of(x, a.k);
    IntVec code_sums = Ints::nothing();
    for (int64_t unit = 0; unit < units_of(a.k); unit += W) {
      const WordVec words = words_of(x + unit * UNIT, a.k - unit * UNIT, scale.codes_per);
      code_sums = Ints::add_codes(code_sums, words);
      store((float*)out + unit, Ints::as_floats(words), (int)(units_of(a.k) - unit));
    }
    float* end = (float*)(out + scale_at(a.k));
    end[0] = scale.scale;
    end[1] = sum(Ints::to_floats(code_sums));
  }
}

void pack(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { pack_tokens<decltype(x)>(a); });
}

void copy(const PackArgs& a) {
  with_type(a.x_dtype, [&](auto x) { copy_rows<decltype(x)>(a); });
}

// A packed row: | float32 scale | float32 0 | int8 codes |
INLINE const int8_t* codes_of(const void* row) { return (const int8_t*)row + 8; }
INLINE float row_scale(const void* row) {
  float scale;
  memcpy(&scale, row, sizeof(scale));
  return scale;
}

// Rows for `many`: | float32 scale | units |
void widen(const LinearTile& t) {
  for (int row = 0; row < t.num_rows; row++) {
    float* to = (float*)t.scratch + row * padded(t.k);
    to[0] = row_scale(t.rows[row]);
    Ints::prepare(codes_of(t.rows[row]), padded(t.k), (int32_t*)to + 1);
  }
}

// ROWS rows, as `widen` leaves them, x VECS vectors of tokens.
template <int ROWS, int VECS>
INLINE void step_many(const LinearTile& t, int first_row) {
  const int64_t num_units = units_of(t.k), width = t.num_tokens;
  const int32_t* units[ROWS];
  for (int r = 0; r < ROWS; r++)
    units[r] = (const int32_t*)t.rows[first_row + r < t.num_rows ? first_row + r : t.num_rows - 1] + 1;
  IntVec acc[ROWS][VECS];
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) acc[r][j] = Ints::nothing();
  const float* x = (const float*)t.x;
  for (int64_t i = 0; i < num_units; i++, x += width) {
    WordVec v[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) v[j] = Ints::as_words(load(x + j * W));
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
      const WordVec w = Ints::broadcast(units[r][i]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j++) acc[r][j] = Ints::multiply(acc[r][j], w, v[j]);
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j++) {
      const Vec scale = load(x + j * W), code_sums = load(x + width + j * W);
      const Vec sum = fma(code_sums, set(-Ints::OFFSET), Ints::to_floats(acc[r][j]));
      store(t.out + (first_row + r) * MAX_WIDTH + j * W, mul(sum, mul(scale, set(row_scale(units[r] - 1)))));
    }
}

template <int VECS>
void many_of(const LinearTile& t) {
  constexpr int ROWS = Ints::rows_of(VECS);
  for (int row = 0; row < t.num_rows; row += ROWS) step_many<ROWS, VECS>(t, row);
}

void many(const LinearTile& t) {
  switch (t.num_tokens / W) {
    case 1: return many_of<1>(t);
    case 2: return many_of<2>(t);
    case 3: return many_of<3>(t);
    default: return many_of<4>(t);
  }
}

// One weight row x TOKENS tokens; out[token], not yet scaled by the row.
template <int TOKENS>
INLINE void row_times(const int8_t* codes, const char* const* x, int64_t size, Vec acc_out[TOKENS]) {
  constexpr int PREFETCH_BYTES = 2048;
  IntVec acc[TOKENS];
  for (int m = 0; m < TOKENS; m++) acc[m] = Ints::nothing();
  for (int64_t k = 0; k < size; k += Ints::CODES) {
    _mm_prefetch((const char*)codes + k + PREFETCH_BYTES, _MM_HINT_T0);
    const WordVec w = Ints::load_codes(codes + k, size - k);
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++) acc[m] = Ints::multiply(acc[m], w, Ints::load_words(x[m] + k * CODE_BYTES, size - k));
  }
  for (int m = 0; m < TOKENS; m++) acc_out[m] = Ints::to_floats(acc[m]);
}

template <int TOKENS>
INLINE void few_of(const LinearTile& t, int first_token) {
  const char* x[TOKENS];
  for (int m = 0; m < TOKENS; m++)
    x[m] = (const char*)t.x + (first_token + m < t.num_tokens ? first_token + m : t.num_tokens - 1) * t.x_stride;
  for (int first = 0; first < t.num_rows; first += W) {
    Vec products[TOKENS][W];
    alignas(64) float scales[W];
    for (int i = 0; i < W; i++) {
      const void* row = t.rows[first + i < t.num_rows ? first + i : t.num_rows - 1];
      scales[i] = row_scale(row);
      Vec one[TOKENS];
      row_times<TOKENS>(codes_of(row), x, padded(t.k), one);
      for (int m = 0; m < TOKENS; m++) products[m][i] = one[m];
    }
    for (int m = 0; m < TOKENS && first_token + m < t.num_tokens; m++) {
      const float* end = (const float*)(x[m] + scale_at(t.k));
      const Vec sum = add(sums(products[m]), set(-Ints::OFFSET * end[1]));
      store(t.out + (first_token + m) * COLUMNS + first, mul(sum, mul(load(scales), set(end[0]))));
    }
  }
}

void few(const LinearTile& t) {
  if (t.num_tokens == 1) return few_of<1>(t, 0);
  if (t.num_tokens == 2) return few_of<2>(t, 0);
  for (int m = 0; m < t.num_tokens; m += FEW_TOKENS) few_of<FEW_TOKENS>(t, m);
}

constexpr LinearKernels w8a8_table(int max_width) {
  LinearKernels table{W, max_width, FEW_TOKENS, false, pack, copy, {}, {}, {}, CODE_BYTES};
  table.widen[(int)DType::w8a8] = widen;
  table.many[(int)DType::w8a8] = many;
  table.few[(int)DType::w8a8] = few;
  return table;
}

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
