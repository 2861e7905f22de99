// linear.h for bf16 weights with the matrix unit: weight rows, where they lie, are the rows of the A tiles, the packed
// activations are the B tiles, and the product comes out as [16 columns of y][16 tokens].
//
//               x   | 16 tokens | 16 tokens |      A row: 32 k of a weight row (`row_stride` apart)
//     w             +-----------+-----------+      B row: a pair of k of 16 tokens (a row of the packed block)
//     16 rows       |  C 0 0    |  C 0 1    |
//     16 rows       |  C 1 0    |  C 1 1    |      2 + 2 loads for 4 products; C stays in tiles over all k
//
// A product takes 16 cycles, a load 8 where the data are in the first cache: half of the loads' time is left over.
// Rounding: activations to bf16 as the model itself has them, sums float32 (two chains a tile, see tiles_emulated.h).
#include "vec_avx512.h"

#include "linear.h"
#include "tiles.h"

namespace hf_paged {
namespace avx512 {
namespace {

// Weights come from memory during the first pass over the tokens, asked for this far in front along k; the next rows
// are asked for during the last pass.
constexpr int AHEAD = 4 * tiles::K;

// Sixteen weight rows. Where they are not equally far apart, or fewer, they are a copy, zero beyond the last.
struct Rows {
  const bf16* first;
  int64_t stride;
  const bf16* tail;  // [16][32]: the last k % 32 numbers of each and zeros
};

INLINE void copy_row(const bf16* from, int64_t count, int64_t padded, bf16* to) {
  for (int64_t k = 0; k < padded; k += tiles::K) _mm512_storeu_si512(to + k, tiles::row(from + k, count - k));
}

// Memory of a call, all of it inside LinearTile::scratch.
struct Scratch {
  bf16 x_tail[tiles::K * MAX_WIDTH];
  bf16 tails[COLUMNS / tiles::ROWS][tiles::ROWS * tiles::K];
};

// Asks for a cache line of each row.
INLINE void prefetch(const Rows& rows, int64_t k) {
  const bf16* p = rows.first + k;
  for (int r = 0; r < tiles::ROWS; r++, p += rows.stride) _mm_prefetch((const char*)p, _MM_HINT_T0);
}

INLINE Rows rows_from(const LinearTile& t, int first_row, int64_t whole_k, bf16* copies, bf16* tail) {
  const bf16* const* from = (const bf16* const*)t.rows + first_row;
  const int count = t.num_rows - first_row < tiles::ROWS ? t.num_rows - first_row : tiles::ROWS;
  Rows rows{from[0], count > 1 ? from[1] - from[0] : 0, tail};
  bool direct = count == tiles::ROWS;
  for (int r = 1; r < count && direct; r++) direct = from[r] - from[0] == r * rows.stride;
  if (!direct) {
    rows.first = copies + first_row * whole_k;
    rows.stride = whole_k;
    for (int r = 0; r < tiles::ROWS; r++)
      copy_row(from[r < count ? r : 0], r < count ? whole_k : 0, whole_k, (bf16*)rows.first + r * whole_k);
  }
  const int64_t left = t.k - whole_k;
  for (int r = 0; r < tiles::ROWS && left; r++)
    copy_row(from[r < count ? r : 0] + whole_k, r < count ? left : 0, tiles::K, tail + r * tiles::K);
  return rows;
}

template <int NT, int MT>
struct Block {
  // Tiles: NT x MT sums, NT of weights, and what is left for activations.
  static constexpr int WEIGHTS = NT * MT, TOKENS = WEIGHTS + NT, KEPT = tiles::COUNT - TOKENS;
  static_assert(KEPT >= 1, "the unit has eight tiles");

  INLINE void step(const bf16* const w[NT], const int64_t stride[NT], const bf16* x, int64_t width) {
    tiles::each<MT>([&](auto m) __attribute__((always_inline)) {
      constexpr int b = TOKENS + decltype(m)::value % KEPT;
      tiles::load<b>(x + decltype(m)::value * 2 * W, width * 4);
      tiles::each<NT>([&](auto n) __attribute__((always_inline)) {
        constexpr int row = decltype(n)::value, a = WEIGHTS + row;
        if constexpr (decltype(m)::value == 0) tiles::load<a>(w[row], stride[row] * 2);
        tiles::multiply<row * MT + decltype(m)::value, a, b>();
      });
    });
  }

  INLINE void run(const LinearTile& t, const Rows* rows, const Rows* next, int first_row, int first_token, Scratch& s) {
    const bool first = first_token == 0, last = first_token + MT * W >= t.num_tokens;
    tiles::each<NT * MT>([&](auto c) __attribute__((always_inline)) { tiles::zero<decltype(c)::value>(); });
    const int64_t width = t.num_tokens, whole_k = t.k / tiles::K * tiles::K;
    const bf16 *w[NT], *x = (const bf16*)t.x + first_token * 2;
    int64_t stride[NT];
    for (int n = 0; n < NT; n++) w[n] = rows[n].first, stride[n] = rows[n].stride;
    for (int64_t k = 0; k < whole_k; k += tiles::K, x += tiles::K * width) {
      if (first && k + AHEAD < whole_k)
        for (int n = 0; n < NT; n++) prefetch(rows[n], k + AHEAD);
      if (last && next) prefetch(*next, k);
      step(w, stride, x, width);
      for (int n = 0; n < NT; n++) w[n] += tiles::K;
    }
    if (whole_k < t.k) {
      for (int n = 0; n < NT; n++) w[n] = rows[n].tail, stride[n] = tiles::K;
      step(w, stride, s.x_tail + first_token * 2, width);
    }
    float* out = t.out + first_row * MAX_WIDTH + first_token;
    tiles::each<NT * MT>([&](auto c) __attribute__((always_inline)) {
      constexpr int n = decltype(c)::value / MT, m = decltype(c)::value % MT;
      tiles::store<decltype(c)::value>(out + n * W * MAX_WIDTH + m * W, sizeof(float) * MAX_WIDTH);
    });
  }
};

// NT tiles of weight rows with all tokens.
template <int NT>
INLINE void rows_with_tokens(const LinearTile& t, const Rows* rows, const Rows* next, int first_row, Scratch& s) {
  int m = 0;
  if constexpr (NT == 1)
    for (; m + 4 * W <= t.num_tokens; m += 4 * W) Block<1, 4>::run(t, rows, next, first_row, m, s);
  for (; m + 2 * W <= t.num_tokens; m += 2 * W) Block<NT, 2>::run(t, rows, next, first_row, m, s);
  if (m < t.num_tokens) Block<NT, 1>::run(t, rows, next, first_row, m, s);
}

// The packed block's rows end at the last k, and a tile's do not.
INLINE void pad_tokens(const LinearTile& t, int64_t whole_k, bf16* out) {
  const int64_t row = t.num_tokens * 2, num_pairs = (t.k - whole_k + 1) / 2;
  memset(out, 0, sizeof(bf16) * tiles::K * t.num_tokens);
  memcpy(out, (const bf16*)t.x + whole_k / 2 * row, sizeof(bf16) * num_pairs * row);
}

void many(const LinearTile& t) {
  const tiles::Configured configured;
  Scratch& s = *(Scratch*)t.scratch;
  const int64_t whole_k = t.k / tiles::K * tiles::K;
  if (whole_k < t.k) pad_tokens(t, whole_k, s.x_tail);
  Rows rows[COLUMNS / tiles::ROWS];
  const int num_tiles = (t.num_rows + tiles::ROWS - 1) / tiles::ROWS;
  for (int n = 0; n < num_tiles; n++) rows[n] = rows_from(t, n * tiles::ROWS, whole_k, (bf16*)(&s + 1), s.tails[n]);
  if (num_tiles == 3 && t.num_tokens == W) return Block<3, 1>::run(t, rows, nullptr, 0, 0, s);
  int n = 0;
  for (; n + 2 <= num_tiles; n += 2)
    rows_with_tokens<2>(t, rows + n, n + 2 < num_tiles ? rows + n + 2 : nullptr, n * tiles::ROWS, s);
  if (n < num_tiles) rows_with_tokens<1>(t, rows + n, nullptr, n * tiles::ROWS, s);
}

// Packing, and few tokens, as without the unit: both are bound by memory.
void pack(const PackArgs& a) { linear_avx512bf16.pack(a); }
void copy(const PackArgs& a) { linear_avx512bf16.copy(a); }
void few(const LinearTile& t) { linear_avx512bf16.few[(int)DType::bf16](t); }

}  // namespace
}  // namespace avx512

extern const LinearKernels linear_amx = {
    avx512::W, MAX_WIDTH, 4, true, avx512::pack, avx512::copy, {nullptr, avx512::many},
    {nullptr, avx512::few}, {}, 0};

}  // namespace hf_paged
