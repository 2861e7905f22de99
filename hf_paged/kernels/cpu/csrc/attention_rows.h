// What both attention kernels share: where keys lie, scores, the running softmax of a row, and its result.
//
// Scores are kept in base 2 (multiplied by log2(e)), so that weights are 2 ** (score - highest).
#pragma once
#include "attention_items.h"
#include "kv_codes.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
// Stands for "no key seen yet" and for hidden keys; finite, so that differences are never NaN.
constexpr float LOWEST = -1e30f;

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int at_most(int n, int limit) { return n < limit ? n : limit; }
INLINE int between(int64_t n, int low, int high) { return n < low ? low : n > high ? high : (int)n; }

// Walks along a request's keys: the number of each key's slot, slots of all blocks and heads counted in memory order.
//
//   cache | block 0: head 0: slot 0 ... block_size - 1 | head 1 ... | block 1: ...
struct KeyWalk {
  const int32_t* block_table;
  int64_t num_kv_heads, kv_head, block_size, block, slot;

  KeyWalk(const AttentionArgs& args, const AttentionItem& item)
      : block_table(item.block_table), num_kv_heads(args.num_kv_heads), kv_head(item.kv_head),
        block_size(args.block_size), block(item.first_key / args.block_size), slot(item.first_key % args.block_size) {}

  // The slots of the next n keys; the rest of `slots` is filled up with the last of them, which may always be read.
  void next(int64_t* slots, int n, int size) {
    int i = 0;
    while (i < n) {
      const int64_t first = ((int64_t)block_table[block] * num_kv_heads + kv_head) * block_size + slot;
      const int run = at_most(n - i, (int)(block_size - slot));
      for (int j = 0; j < run; j++) slots[i + j] = first + j;
      i += run;
      slot += run;
      if (slot == block_size) slot = 0, block++;
    }
    for (; i < size; i++) slots[i] = slots[n - 1];
  }
};

// The scales of some keys or values, if they are codes.
template <class T, int N>
struct Scales {
  f16 halves[N];

  INLINE void fetch(const f16* scales, const int64_t* slots) {
    for (int i = 0; i < N; i += 4) _mm_prefetch((const char*)(scales + slots[i]), _MM_HINT_T1);
  }
  Scales(const f16* scales, const int64_t* slots) {
    for (int i = 0; i < N; i++) halves[i] = scales[slots[i]];
  }
  // Of W of them.
  __attribute__((always_inline)) Vec from(int i) const { return mul(load(halves + i), set(Codes<T>::UNIT)); }
};

// Keys that a row sees, the chunk's first key being number 0: low ... high - 1.
struct Visible {
  int low, high;
};

INLINE Visible visible(const AttentionArgs& args, int64_t position, int64_t first_key, int num_keys) {
  const int64_t high = position + 1 - first_key, low = args.window > 0 ? high - args.window : 0;
  return {between(low, 0, num_keys), between(high, 0, num_keys)};
}

INLINE Vec lane_numbers() {
  static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

// tanh, relative error 4e-7; a NaN stays one.
INLINE Vec tanh(Vec x) {
  const Vec bounded = max(set(-10.f), min(set(10.f), x)), square = mul(bounded, bounded);
  const Vec power = exp2(mul(bounded, set(2 * LOG2_E)));
  const Vec large = sub(set(1.f), div(set(2.f), add(power, set(1.f))));
  Vec small = set(0.021869488f);  // Taylor, up to x ** 9
  small = fma(small, square, set(-0.053968254f));
  small = fma(small, square, set(0.13333333f));
  small = fma(small, square, set(-0.33333333f));
  small = fma(mul(small, square), bounded, bounded);
  return select_less(square, set(0.0625f), small, large);
}

// Turns dot products into scores.
struct Scoring {
  float scale, cap, inverse_cap;
  bool capped;

  explicit Scoring(const AttentionArgs& args)
      : scale(args.softcap > 0 ? args.scale : args.scale * LOG2_E), cap(args.softcap * LOG2_E),
        inverse_cap(args.softcap > 0 ? 1 / args.softcap : 0), capped(args.softcap > 0) {}

  // Whether a greater dot product is a greater score, and nothing but a factor lies between them.
  bool scales_only(const float* slope) const { return !capped && !slope && scale >= 0; }

  // `distance`: of the first of these keys from the query, negative where the key lies before it.
  __attribute__((always_inline)) Vec score(Vec dot, const float* slope, float distance) const {
    Vec x = mul(dot, set(scale));
    if (capped) x = mul(tanh(mul(x, set(inverse_cap))), set(cap));
    if (slope) x = fma(mul(add(set(distance), lane_numbers()), set(*slope)), set(LOG2_E), x);
    return x;
  }
};

// x, and `hidden` in the lanes of keys that are not visible; x is the j-th vector of its chunk.
INLINE Vec hide(Vec x, Visible seen, int j, Vec hidden) {
  x = select_first(between(seen.high - j * W, 0, W), x, hidden);
  return select_first(between(seen.low - j * W, 0, W), hidden, x);
}

// A row's softmax so far; the sums of weight * value are kept elsewhere and scaled with it.
struct RowState {
  float highest, weights;
};

// Turns a row's dot products with `N * W` keys into weights, in place, and returns the factor for its earlier sums.
template <int N>
INLINE float soften(float* row, RowState& state, const Scoring& scoring, Visible seen, const float* slope,
                    float distance) {
  Vec x[N], top = set(LOWEST);
  const bool whole = seen.low == 0 && seen.high == N * W;
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    x[i] = scoring.score(load(row + i * W), slope, distance + i * W);
    if (!whole) x[i] = hide(x[i], seen, i, set(LOWEST));
    top = max(top, x[i]);
  }
  const float top_score = highest(top), now = top_score > state.highest ? top_score : state.highest;
  Vec total = zero();
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    x[i] = exp2(sub(x[i], set(now)));
    if (!whole) x[i] = hide(x[i], seen, i, zero());
    total = add(total, x[i]);
    store(row + i * W, x[i]);
  }
  const float factor = now > state.highest ? exp2f(state.highest - now) : 1.f;
  state.weights = state.weights * factor + sum(total);
  state.highest = now;
  return factor;
}

// What soften_group must know of a row.
struct RowView {
  Visible seen;
  const float* slope;
  float distance;
};

// The same for up to W rows at once, `N * W` keys each, rows `stride` apart: their highest scores and sums of weights
// are found together, by transposing. `view(i)` tells about row i; factors[i] becomes the factor for its earlier sums.
// Weights are stored as Math's elements.
template <class Math, int N, class View>
INLINE void soften_group(float* scores, int64_t stride, int num_rows, const Scoring& scoring, const View& view,
                         float* highest_scores, float* weights, float* factors) {
  Vec gathered[W];
  for (int i = 0; i < num_rows; i++) {
    const RowView row = view(i);
    const bool whole = row.seen.low == 0 && row.seen.high == N * W, scaled_only = scoring.scales_only(row.slope);
    Vec top = set(LOWEST);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      Vec x = load(scores + i * stride + j * W);
      if (!scaled_only) store(scores + i * stride + j * W, x = scoring.score(x, row.slope, row.distance + j * W));
      if (!whole) x = hide(x, row.seen, j, set(LOWEST));
      top = max(top, x);
    }
    gathered[i] = scaled_only ? max(mul(top, set(scoring.scale)), set(LOWEST)) : top;
  }
  for (int i = num_rows; i < W; i++) gathered[i] = set(LOWEST);
  transpose(gathered);
  const Vec before = load(highest_scores);
  Vec now = before;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) now = max(now, gathered[i]);
  store(highest_scores, now);
  const Vec factor = exp2(sub(before, now));  // exactly 1 where nothing changed
  store(factors, factor);
  for (int i = 0; i < num_rows; i++) {
    const RowView row = view(i);
    const bool whole = row.seen.low == 0 && row.seen.high == N * W;
    const Vec scale = set(scoring.scales_only(row.slope) ? scoring.scale : 1.f), shift = set(-highest_scores[i]);
    Vec totals[2] = {zero(), zero()};
#pragma GCC unroll 4
    for (int j = 0; j < N; j += 2) {
      Vec x[2];
      for (int k = 0; k < 2; k++) {
        x[k] = exp2(fma(load(scores + i * stride + (j + k) * W), scale, shift));
        if (!whole) x[k] = hide(x[k], row.seen, j + k, zero());
        totals[k] = add(totals[k], x[k]);
      }
      Math::store_weights(scores + i * stride, j, x[0], x[1]);
    }
    gathered[i] = add(totals[0], totals[1]);
  }
  for (int i = num_rows; i < W; i++) gathered[i] = zero();
  store(weights, fma(load(weights), factor, sums(gathered)));
}

// Multiplies a row's sums.
INLINE void rescale(float* sums, int64_t size, float factor) {
  for (int64_t d = 0; d < size; d += W) store(sums + d, mul(load(sums + d), set(factor)));
}

// Writes a row's sums * factor to the output.
template <class T>
INLINE void write_output(T* out, const float* sums, int64_t size, float factor) {
  int64_t d = 0;
  for (; d + W <= size; d += W) store(out + d, mul(load(sums + d), set(factor)));
  if (d < size) store(out + d, mul(load(sums + d, (int)(size - d)), set(factor)), (int)(size - d));
}

// Adds the sink, divides, and writes output and log-sum-exp of one token and head.
INLINE void finish(const AttentionArgs& args, int64_t token, int64_t head, RowState state, const float* sums) {
  float factor = 1;
  if (args.sinks) {
    const float sink = args.sinks[head] * LOG2_E, top = sink > state.highest ? sink : state.highest;
    factor = exp2f(state.highest - top);
    state = {top, state.weights * factor + exp2f(sink - top)};
  }
  factor = state.weights == 0 ? 0 : factor / state.weights;
  const int64_t at = token * args.output_stride + head * args.value_dim;
  with_type(args.output_dtype, [&](auto number) {
    write_output((decltype(number)*)args.output + at, sums, args.value_dim, factor);
  });
  if (args.lse) {
    const float none = -__builtin_inff();
    args.lse[token * args.num_query_heads + head] =
        state.weights == 0 ? none : (state.highest + log2f(state.weights)) * LN_2;
  }
}

INLINE float* partial_of(const AttentionArgs& args, float* partials, int64_t part, int64_t head) {
  return partials + (part * args.num_query_heads + head) * partial_size(args);
}

// Hands over a row's result: finished if it is the only one, otherwise as a partial result.
INLINE void hand_over(const AttentionArgs& args, const AttentionItem& item, int row, RowState state,
                      const float* sums) {
  const int64_t token = item.tokens[row / item.num_heads], head = item.first_head + row % item.num_heads;
  if (!item.partials) return finish(args, token, head, state, sums);
  float* partial = partial_of(args, item.partials, item.first_parts[token] + item.part, head);
  write_output(partial, sums, args.value_dim, 1.f);
  partial[args.value_dim] = state.highest;
  partial[args.value_dim + 1] = state.weights;
}

void merge(const AttentionArgs& args, const float* partials, int64_t first_part, int64_t num_parts, int64_t token,
           int64_t first_head, int64_t num_heads) {
  const int64_t size = args.value_dim;
  for (int64_t head = first_head; head < first_head + num_heads; head++) {
    float* sums = partial_of(args, const_cast<float*>(partials), first_part, head);  // of the first, added to in place
    RowState state = {sums[size], sums[size + 1]};
    for (int64_t part = first_part + 1; part < first_part + num_parts; part++) {
      const float* other = partial_of(args, const_cast<float*>(partials), part, head);
      const float top = other[size] > state.highest ? other[size] : state.highest;
      const float factor = exp2f(state.highest - top), other_factor = exp2f(other[size] - top);
      for (int64_t d = 0; d < size; d++) sums[d] = sums[d] * factor + other[d] * other_factor;
      state = {top, state.weights * factor + other[size + 1] * other_factor};
    }
    finish(args, token, head, state, sums);
  }
}

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
