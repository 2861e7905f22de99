// Paged attention with the matrix unit for a bf16 cache: both products on tiles, the softmax of attention_rows.h
// between them, 32 rows and a chunk of keys at a time.
//
//              keys as B tiles (transposed by pairs of dimensions)           values as B tiles (pairs of keys)
//              +----+----+ ... +----+                                         +----+----+ ...
//   queries    |scores            |  --softmax-->  weights, bf16, as A tiles  |sums          += weights x values
//   (A tiles)  |    |    |     |    |                                         |    |    |
//
// Keys and values are copied into tiles once per chunk for all rows of an item, which is where any head size, any block
// size and the end of the keys are dealt with: what a tile has beyond them is zero and was never read from the cache.
// Queries and weights are rounded to bf16; scores, softmax and sums are float32.
#include "vec_avx512.h"

#include "attention_rows.h"
#include "tiles.h"

namespace hf_paged {
namespace avx512 {
namespace {

constexpr int CHUNK = 128;             // keys
constexpr int PAIR = 2 * tiles::ROWS;  // rows that go through softmax together: two tiles
constexpr int64_t TILE = tiles::BYTES / sizeof(bf16);
constexpr int ALL_ROWS = (MANY_ROWS + PAIR - 1) / PAIR * PAIR;

struct Sizes {
  int64_t key, value;  // head sizes, padded
  explicit Sizes(const AttentionArgs& args)
      : key(round_up(args.key_dim, 32)), value(round_up(args.value_dim, 32)) {}
  int64_t floats() const {
    return (PAIR + PAIR / 2) * CHUNK + (ALL_ROWS + CHUNK) * key / 2 + CHUNK * value / 2 + ALL_ROWS * value;
  }
};

// The memory of an item.
struct Memory {
  float* scores;  // [PAIR][CHUNK]
  bf16* weights;  // [PAIR][CHUNK]
  float* sums;    // [ALL_ROWS][value]
  bf16* query;    // [ALL_ROWS][key]
  bf16* keys;     // [CHUNK / 16][key / 32] tiles
  bf16* values;   // [CHUNK / 32][value / 16] tiles

  Memory(float* scratch, const Sizes& size) {
    scores = scratch;
    weights = (bf16*)(scores + PAIR * CHUNK);
    sums = (float*)(weights + PAIR * CHUNK);
    query = (bf16*)(sums + ALL_ROWS * size.value);
    keys = query + ALL_ROWS * size.key;
    values = keys + CHUNK * size.key;
  }
};

template <class T>
INLINE void copy_query(const T* from, int64_t size, int64_t padded, bf16* to) {
  for (int64_t d = 0; d < padded; d += W)
    store(to + d, d < size ? load(from + d, at_most((int)(size - d), W)) : zero());
}

template <class T>
INLINE void copy_queries(const AttentionArgs& args, const AttentionItem& item, int64_t padded, int num_rows,
                         bf16* out) {
  for (int row = 0; row < num_rows; row++) {
    const int64_t token = item.tokens[row / item.num_heads], head = item.first_head + row % item.num_heads;
    const T* query = (const T*)args.query + token * args.query_stride + head * args.key_dim;
    copy_query(query, args.key_dim, padded, out + row * padded);
  }
  memset(out + num_rows * padded, 0, sizeof(bf16) * (round_up(num_rows, PAIR) - num_rows) * padded);
}

// Asks for a row of the cache.
INLINE void prefetch(const bf16* row, int64_t size) {
  for (int64_t d = 0; d < size; d += tiles::K) _mm_prefetch((const char*)(row + d), _MM_HINT_T0);
}

// Keys [16 keys][32 d] -> a tile [16 pairs of d][16 keys][2].
template <bool WHOLE>
INLINE void pack_tile(const bf16* const keys[W], int num_keys, int64_t d, int64_t size, bf16* out) {
  Vec r[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    const bf16* key = keys[i] + d;
    r[i] = _mm512_castsi512_ps(WHOLE ? _mm512_loadu_si512(key) : tiles::row(key, i < num_keys ? size - d : 0));
  }
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store((float*)out + i * W, r[i]);
}

// A tile for each 32 dimensions of each 16 keys. Meanwhile the values of these keys are on their way from memory.
void pack_keys(const AttentionArgs& args, const int64_t* slots, int num_keys, int64_t padded, bf16* out) {
  const int64_t size = args.key_dim, value_size = args.value_dim;
  for (int first = 0; first < num_keys; first += tiles::ROWS) {
    const bf16* keys[W];
    for (int i = 0; i < W; i++) {
      keys[i] = (const bf16*)args.key_cache + slots[first + i] * size;
      prefetch((const bf16*)args.value_cache + slots[first + i] * value_size, value_size);
    }
    int64_t d = 0;
    if (first + tiles::ROWS <= num_keys)
      for (; d + tiles::K <= size; d += tiles::K, out += TILE) pack_tile<true>(keys, W, d, size, out);
    for (; d < padded; d += tiles::K, out += TILE) pack_tile<false>(keys, num_keys - first, d, size, out);
  }
}

// Values [2 keys][32 d] -> a row of two neighbouring tiles [16 pairs of keys][16 d][2]. Any order of the keys will do,
// if it is that of the weights as well: key i of 32 goes with key i + 16. Meanwhile the keys of the next chunk are on
// their way from memory.
void pack_values(const AttentionArgs& args, const int64_t* slots, const int64_t* next_slots, int num_keys, int num_next,
                 int64_t padded, bf16* out) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const bf16* cache = (const bf16*)args.value_cache;
  const int64_t size = args.value_dim, key_size = args.key_dim;
  for (int i = 0; i < num_next; i++) prefetch((const bf16*)args.key_cache + next_slots[i] * key_size, key_size);
  for (int first = 0; first < num_keys; first += tiles::K)
    for (int key = first; key < first + W; key++) {
      const bf16 *a = cache + slots[key] * size, *b = cache + slots[key + W] * size;
      const bool whole = key + W < num_keys;
      bf16* to = out + first * padded + (key - first) * tiles::K;
      for (int64_t d = 0; d < padded; d += tiles::K, to += 2 * TILE) {
        const bool all = whole && d + tiles::K <= size;
        const __m512i x = all ? _mm512_loadu_si512(a + d) : tiles::row(a + d, key < num_keys ? size - d : 0);
        const __m512i y = all ? _mm512_loadu_si512(b + d) : tiles::row(b + d, key + W < num_keys ? size - d : 0);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(to + TILE, _mm512_permutex2var_epi16(x, high, y));
      }
    }
}

// Where the tiles of a product lie: b holds tiles of 1 KB, `b_step` elements from one 32 k to the next, `b_column` from
// one 16 columns to the next.
struct Product {
  const bf16* a;
  int64_t a_stride;
  const bf16* b;
  int64_t b_step, b_column, num_steps;
  float* c;
  int64_t c_stride;
};

// c (+)= a b for R x 2 tiles. Loads per product: R = 2: 4 for 4; R = 1: 3 for 2.
template <int R, bool ADD>
INLINE void multiply(const Product& p) {
  constexpr int A = 2 * R, B = A + R;
  tiles::each<2 * R>([&](auto c) __attribute__((always_inline)) {
    constexpr int tile = decltype(c)::value;
    if (ADD) tiles::load<tile>(p.c + tile / 2 * tiles::ROWS * p.c_stride + tile % 2 * W, p.c_stride * 4);
    else tiles::zero<tile>();
  });
  const bf16 *a = p.a, *b = p.b;
  const int64_t a_bytes = p.a_stride * 2, b_column = p.b_column, b_step = p.b_step;
  for (int64_t i = 0; i < p.num_steps; i++, a += tiles::K, b += b_step) {
    tiles::load<B>(b, 64);
    tiles::load<A>(a, a_bytes);
    tiles::multiply<0, A, B>();
    tiles::load<B + 1>(b + b_column, 64);
    tiles::multiply<1, A, B + 1>();
    if constexpr (R == 2) {
      tiles::load<A + 1>((const char*)a + tiles::ROWS * a_bytes, a_bytes);
      tiles::multiply<2, A + 1, B>();
      tiles::multiply<3, A + 1, B + 1>();
    }
  }
  tiles::each<2 * R>([&](auto c) __attribute__((always_inline)) {
    constexpr int tile = decltype(c)::value;
    tiles::store<tile>(p.c + tile / 2 * tiles::ROWS * p.c_stride + tile % 2 * W, p.c_stride * 4);
  });
}

template <bool ADD>
INLINE void multiply_columns(Product p, int num_rows, int64_t num_columns) {
  for (int64_t column = 0; column < num_columns; column += 2 * W, p.b += 2 * p.b_column, p.c += 2 * W) {
    if (num_rows > tiles::ROWS) multiply<2, ADD>(p);
    else multiply<1, ADD>(p);
  }
}

// Weights of 32 keys -> a row of an A tile, in the order of pack_values. They are at least 0, so that half-way cases
// may all go up.
INLINE void round_weights(const float* from, int num_keys, bf16* to) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
  for (int key = 0; key < num_keys; key += tiles::K) {
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(load(from + key)), half);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(load(from + key + W)), half);
    constexpr int first_or_second_and_third = 0xf8;
    const __m512i low = _mm512_srli_epi32(a, 16);
    _mm512_storeu_si512(to + key, _mm512_ternarylogic_epi32(low, b, upper, first_or_second_and_third));
  }
}

struct Item {
  const AttentionArgs& args;
  const AttentionItem& item;
  const Sizes size;
  const Memory memory;
  const Scoring scoring;
  const int num_rows;
  RowState states[ALL_ROWS];

  Item(const AttentionArgs& a, const AttentionItem& i, float* scratch)
      : args(a), item(i), size(a), memory(scratch, size), scoring(a), num_rows(i.num_tokens * i.num_heads) {}

  float soften_row(int row, int64_t first_key, int num_keys, Visible seen) {
    const int32_t position = item.positions[item.tokens[row / item.num_heads]];
    const float* slope = args.alibi_slopes ? args.alibi_slopes + item.first_head + row % item.num_heads : nullptr;
    const float distance = (float)(first_key - position);
    float* scores = memory.scores + row % PAIR * CHUNK;
    if (num_keys <= 2 * W) return soften<2>(scores, states[row], scoring, seen, slope, distance);
    if (num_keys <= 4 * W) return soften<4>(scores, states[row], scoring, seen, slope, distance);
    return soften<8>(scores, states[row], scoring, seen, slope, distance);
  }

  // Scores -> weights; earlier sums are brought to the same highest score. Rows beyond the last have weight 0.
  void soften_rows(int first_row, int64_t first_key, int num_keys) {
    const int padded = (int)round_up(num_keys, tiles::K);
    for (int row = first_row; row < first_row + PAIR; row++) {
      bf16* weights = memory.weights + row % PAIR * CHUNK;
      Visible seen = {0, 0};
      if (row < num_rows) seen = visible(args, item.positions[item.tokens[row / item.num_heads]], first_key, num_keys);
      if (seen.low >= seen.high) {
        memset(weights, 0, sizeof(bf16) * padded);
        continue;
      }
      const float factor = soften_row(row, first_key, num_keys, seen);
      if (factor != 1) rescale(memory.sums + row * size.value, size.value, factor);
      round_weights(memory.scores + row % PAIR * CHUNK, padded, weights);
    }
  }

  void chunk(int64_t first_key, int num_keys) {
    const int64_t padded = round_up(num_keys, tiles::K);
    for (int row = 0; row < num_rows; row += PAIR) {
      const int rows = at_most(num_rows - row, PAIR);
      multiply_columns<false>({memory.query + row * size.key, size.key, memory.keys, TILE, size.key / tiles::K * TILE,
                               size.key / tiles::K, memory.scores, CHUNK},
                              rows, padded);
      soften_rows(row, first_key, num_keys);
      multiply_columns<true>({memory.weights, CHUNK, memory.values, size.value / W * TILE, TILE, padded / tiles::K,
                              memory.sums + row * size.value, size.value},
                             rows, size.value);
    }
  }

  void run() {
    if (args.query_dtype == DType::f32) copy_queries<float>(args, item, size.key, num_rows, memory.query);
    else copy_queries<bf16>(args, item, size.key, num_rows, memory.query);
    memset(memory.sums, 0, sizeof(float) * round_up(num_rows, PAIR) * size.value);
    for (int row = 0; row < num_rows; row++) states[row] = {LOWEST, 0};
    int64_t slots[2][CHUNK];  // of this chunk's keys and the next one's
    KeyWalk walk(args, item);
    int num_keys = at_most(item.end_key - item.first_key, CHUNK), turn = 0;
    if (num_keys > 0) walk.next(slots[turn], num_keys, CHUNK);
    for (int key = item.first_key; key < item.end_key; turn ^= 1) {
      const int num_next = at_most(item.end_key - key - num_keys, CHUNK);
      if (num_next > 0) walk.next(slots[turn ^ 1], num_next, CHUNK);
      pack_keys(args, slots[turn], num_keys, size.key, memory.keys);
      pack_values(args, slots[turn], slots[turn ^ 1], num_keys, num_next, size.value, memory.values);
      chunk(key, num_keys);
      key += num_keys;
      num_keys = num_next;
    }
    for (int row = 0; row < num_rows; row++)
      hand_over(args, item, row, states[row], memory.sums + row * size.value);
  }
};

void many_rows(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const tiles::Configured configured;
  Item(args, item, scratch).run();
}

// Few rows do not fill a tile, and are bound by memory without the unit as well.
const AttentionKernels& without_unit() { return prefers_bf16_dot() ? attention_avx512bf16 : attention_avx512; }

void few_rows(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  without_unit().few_rows(args, item, scratch);
}

int64_t scratch_size(const AttentionArgs& args) {
  const int64_t own = Sizes(args).floats(), other = without_unit().scratch_size(args);
  return own > other ? own : other;
}

}  // namespace
}  // namespace avx512

extern const AttentionKernels attention_amx = {avx512::few_rows, avx512::many_rows, avx512::merge,
                                               avx512::scratch_size};

}  // namespace hf_paged
