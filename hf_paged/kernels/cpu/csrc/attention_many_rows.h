// Attention of many query rows as blocked matrix products: prefill, prefixes that requests share, large head groups.
//
//   queries, once      [element of key_dim][MANY_ROWS]
//   for each chunk of 128 keys:
//     keys             [element of key_dim][128 keys]     copied transposed, so that vectors run along the keys
//     values           [element of 128 keys][value_dim]   copied widened, zeros for keys past the end
//     for each group of 12 rows (6 with AVX2):
//       scores         [row][128 keys] = queries^T keys   then weights, in place
//       sums           [row][value_dim] += weights values
//
// An element is 32 bits: a float32 number, or with DotMath two bfloat16 numbers of the summed dimension.
#pragma once
#include "attention_math.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

constexpr int MANY_KEYS = 128;              // keys of a chunk
constexpr int ROW_UNIT = W == 16 ? 4 : 2;
constexpr int GROUP = 3 * ROW_UNIT;         // rows that are multiplied at a time at most: 3, 2 or 1 units

// out[r][c] (+)= sum over n elements e of left[r * LEFT_ROW + e * LEFT_STEP] * right[e * right_stride + c], for R rows
// and C vectors of columns.
template <class Math, int R, int C, int LEFT_ROW, int LEFT_STEP, bool ADD>
INLINE void multiply_tile(const float* left, const float* right, int64_t right_stride, int n, float* out,
                          int64_t out_stride) {
  Vec sum[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = ADD ? load(out + r * out_stride + c * W) : zero();
#pragma GCC unroll 1
  for (int e = 0; e < n; e++) {
    Vec b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) b[c] = load(right + e * right_stride + c * W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec a = set(left[r * LEFT_ROW + e * LEFT_STEP]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = Math::multiply_add(a, b[c], sum[r][c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * out_stride + c * W, sum[r][c]);
}

template <class Math, int R, int LEFT_ROW, int LEFT_STEP, bool ADD>
void multiply_rows(const float* left, const float* right, int64_t right_stride, int n, float* out, int64_t out_stride,
                   int columns) {
  int c = 0;
  for (; c + 2 * W <= columns; c += 2 * W)
    multiply_tile<Math, R, 2, LEFT_ROW, LEFT_STEP, ADD>(left, right + c, right_stride, n, out + c, out_stride);
  for (; c < columns; c += W)
    multiply_tile<Math, R, 1, LEFT_ROW, LEFT_STEP, ADD>(left, right + c, right_stride, n, out + c, out_stride);
}

template <class Math, int LEFT_ROW, int LEFT_STEP, bool ADD>
INLINE void multiply(const float* left, const float* right, int64_t right_stride, int n, float* out,
                     int64_t out_stride, int rows, int columns) {
  const auto multiply_all = rows == 3 * ROW_UNIT   ? multiply_rows<Math, 3 * ROW_UNIT, LEFT_ROW, LEFT_STEP, ADD>
                            : rows == 2 * ROW_UNIT ? multiply_rows<Math, 2 * ROW_UNIT, LEFT_ROW, LEFT_STEP, ADD>
                                                   : multiply_rows<Math, ROW_UNIT, LEFT_ROW, LEFT_STEP, ADD>;
  multiply_all(left, right, right_stride, n, out, out_stride, columns);
}

struct ManyRowsScratch {
  int64_t elements, value_stride;  // elements of a key, padded; columns of a value, padded
  float *query, *keys, *values, *scores, *sums;

  template <class Math>
  INLINE ManyRowsScratch of(const AttentionArgs& args, float* scratch) {
    ManyRowsScratch m;
    m.elements = round_up((args.key_dim + Math::PER_ELEMENT - 1) / Math::PER_ELEMENT, W);
    m.value_stride = round_up(args.value_dim, W);
    m.query = scratch;
    m.keys = m.query + m.elements * MANY_ROWS;
    m.values = m.keys + m.elements * MANY_KEYS;
    m.scores = m.values + MANY_KEYS / Math::PER_ELEMENT * m.value_stride;
    // Queries pass through the scores' place, W at a time, before there are scores.
    const int64_t passing = W * m.elements;
    m.sums = m.scores + (passing > GROUP * MANY_KEYS ? passing : GROUP * MANY_KEYS);
    return m;
  }
  int64_t size(const float* scratch) const { return sums + MANY_ROWS * value_stride - scratch; }
};

// W rows of elements become W columns of a matrix.
INLINE void store_transposed(Vec rows[W], float* out, int64_t stride) {
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store(out + i * stride, rows[i]);
}

template <class Math>
void pack_queries(const AttentionArgs& args, const AttentionItem& item, const ManyRowsScratch& memory) {
  const int num_rows = item.num_tokens * item.num_heads;
  float* packed = memory.scores;  // not in use yet
  for (int first = 0; first < num_rows; first += W) {
    for (int i = 0; i < W; i++) {
      const int row = at_most(first + i, num_rows - 1);
      const int64_t at = item.tokens[row / item.num_heads] * args.query_stride +
                         (item.first_head + row % item.num_heads) * args.key_dim;
      Math::pack_query(packed + i * memory.elements, args.query, args.query_dtype, at, args.key_dim);
    }
    for (int64_t e = 0; e < memory.elements; e += W) {
      Vec rows[W];
      for (int i = 0; i < W; i++) rows[i] = load(packed + i * memory.elements + e);
      store_transposed(rows, memory.query + e * MANY_ROWS + first, MANY_ROWS);
    }
  }
}

// W rows of elements, from dimension d of W keys on, as W columns.
template <class Math, class Read>
INLINE void pack_step(const typename Math::Cache* const* keys, const Vec& scales, int d, float* out, const Read& read) {
  Vec rows[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) rows[i] = read(keys[i] + d);
  transpose(rows);
  if constexpr (Codes<typename Math::Cache>::ARE) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) rows[i] = mul(rows[i], scales);
  }
  float* to = out + d / Math::PER_ELEMENT * MANY_KEYS;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store(to + i * MANY_KEYS, rows[i]);
}

// Copies n keys, transposed; columns up to the next multiple of W repeat the last one and are hidden later.
template <class Math>
INLINE void pack_keys(const AttentionArgs& args, const int64_t* slots, int n, float* out) {
  typedef typename Math::Cache T;
  constexpr int STEP = W * Math::PER_ELEMENT;
  const int key_dim = (int)args.key_dim, whole = key_dim / STEP * STEP;
  for (int first = 0; first < n; first += W) {
    const T* keys[W];
    for (int i = 0; i < W; i++) keys[i] = (const T*)args.key_cache + slots[first + i] * key_dim;
    Vec scales = zero();
    if constexpr (Codes<T>::ARE) scales = Scales<T, W>(args.key_scales, slots + first).from(0);
    for (int d = 0; d < whole; d += STEP)
      pack_step<Math>(keys, scales, d, out + first, [](const T* p) __attribute__((always_inline)) {
        return Math::elements(p);
      });
    if (whole < key_dim)
      pack_step<Math>(keys, scales, whole, out + first, [=](const T* p) __attribute__((always_inline)) {
        return Math::elements(p, key_dim - whole);
      });
  }
}

template <class Math>
INLINE void pack_all_values(const AttentionArgs& args, const int64_t* slots, int n, const ManyRowsScratch& memory) {
  typedef typename Math::Cache T;
  float* out = memory.values;
  for (int key = 0; key < n; key += Math::PER_ELEMENT, out += memory.value_stride) {
    const T* from[Math::PER_ELEMENT];
    for (int i = 0; i < Math::PER_ELEMENT; i++)
      from[i] = key + i < n ? (const T*)args.value_cache + slots[key + i] * args.value_dim : nullptr;
    Math::pack_values(out, from, (int)args.value_dim);
    if constexpr (Codes<T>::ARE)
      rescale(out, memory.value_stride, _cvtsh_ss(args.value_scales[slots[key]].bits) * Codes<T>::UNIT);
  }
}

// What is known of each row, and its softmax so far.
struct Rows {
  int num_rows;
  int64_t positions[MANY_ROWS], first_position, last_position;
  float highest[MANY_ROWS + W], weights[MANY_ROWS + W];  // a vector may begin at any row
  const float* slopes[MANY_ROWS];

  Rows(const AttentionArgs& args, const AttentionItem& item) {
    num_rows = 0;
    first_position = last_position = item.positions[item.tokens[0]];
    for (int token = 0; token < item.num_tokens; token++) {
      const int64_t position = item.positions[item.tokens[token]];
      first_position = position < first_position ? position : first_position;
      last_position = position > last_position ? position : last_position;
      for (int head = 0; head < item.num_heads; head++, num_rows++) {
        positions[num_rows] = position;
        slopes[num_rows] = args.alibi_slopes ? args.alibi_slopes + item.first_head + head : nullptr;
      }
    }
    for (int row = 0; row < MANY_ROWS + W; row++) highest[row] = LOWEST, weights[row] = 0;
  }
};

// The rows first ... first + count - 1, at most W, whose scores lie at the beginning of theirs.
template <class Math>
INLINE void soften_rows(const AttentionArgs& args, const ManyRowsScratch& memory, int first, int count, int key, int n,
                        const Scoring& scoring, Rows& rows) {
  const bool window_ends = args.window > 0 && rows.last_position - args.window >= key;
  const bool all_visible = n == MANY_KEYS && rows.first_position + 1 >= key + n && !window_ends;
  float factors[W];
  const auto view = [&](int i) __attribute__((always_inline)) {
    const int64_t position = rows.positions[first + i];
    const Visible seen = all_visible ? Visible{0, n} : visible(args, position, key, n);
    return RowView{seen, rows.slopes[first + i], (float)(key - position)};
  };
  soften_group<Math, MANY_KEYS / W>(memory.scores, MANY_KEYS, count, scoring, view, rows.highest + first,
                                    rows.weights + first, factors);
  for (int i = 0; i < count; i++)
    if (factors[i] != 1) rescale(memory.sums + (first + i) * memory.value_stride, memory.value_stride, factors[i]);
}

template <class Math>
void many_rows(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const ManyRowsScratch memory = ManyRowsScratch::of<Math>(args, scratch);
  const Scoring scoring(args);
  Rows rows(args, item);
  const int padded_rows = (int)round_up(rows.num_rows, ROW_UNIT), value_stride = (int)memory.value_stride;
  const int elements = (int)((args.key_dim + Math::PER_ELEMENT - 1) / Math::PER_ELEMENT);
  pack_queries<Math>(args, item, memory);
  for (int i = 0; i < padded_rows * value_stride; i += W) store(memory.sums + i, zero());
  KeyWalk walk(args, item);
  int64_t slots[MANY_KEYS];
  for (int key = item.first_key; key < item.end_key; key += MANY_KEYS) {
    const int n = at_most(MANY_KEYS, item.end_key - key);
    walk.next(slots, n, MANY_KEYS);
    pack_keys<Math>(args, slots, n, memory.keys);
    pack_all_values<Math>(args, slots, n, memory);
    // A few rows from scores to sums, so that all that they need stays in the first cache.
    for (int row = 0; row < padded_rows; row += GROUP) {
      const int count = at_most(padded_rows - row, GROUP);
      multiply<Math, 1, MANY_ROWS, false>(memory.query + row, memory.keys, MANY_KEYS, elements, memory.scores,
                                          MANY_KEYS, count, (int)round_up(n, W));
      soften_rows<Math>(args, memory, row, at_most(rows.num_rows - row, GROUP), key, n, scoring, rows);
      multiply<Math, MANY_KEYS, 1, true>(memory.scores, memory.values, value_stride,
                                         (n + Math::PER_ELEMENT - 1) / Math::PER_ELEMENT,
                                         memory.sums + row * value_stride, value_stride, count, value_stride);
    }
  }
  for (int row = 0; row < rows.num_rows; row++)
    hand_over(args, item, row, {rows.highest[row], rows.weights[row]}, memory.sums + row * value_stride);
}

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
