// Attention of a few query rows that see all keys of an item: decoding. Reads each key and value once, where it lies.
//
//   for each chunk of 32 keys, while the next chunk is fetched (its keys in the first step, its values in the last, so
//   that memory is never idle):
//     dots[row][key]    += query[row][d] * key[d]        W keys at a time: one vector of partial sums per row and key,
//                                                        then W vectors are summed into one by transposing
//     weights[row][key]  = 2 ** (score - highest)        running softmax
//     sums[row][d]      += weights[row][key] * value[key][d]    each value is widened once for all rows
#pragma once
#include "attention_math.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

constexpr int FEW_KEYS = 32;  // keys of a chunk

// Asks for memory ahead of its use; into the L2 cache, because requests to the L1 cache block each other (30 % slower).
INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char*)p + at, _MM_HINT_T1);
}

// U keys against R rows; out[r * W + u] is a vector whose sum is the dot product.
template <class Math, int R, int U>
INLINE void partial_dots(const typename Math::Cache* keys, const int64_t* slots, int key_dim, const float* query,
                         int64_t query_stride, Vec* out) {
  constexpr int STEP = W * Math::PER_ELEMENT;
  const typename Math::Cache* key[U];
  Vec dot[R][U];
#pragma GCC unroll 8
  for (int u = 0; u < U; u++) {
    key[u] = keys + slots[u] * key_dim;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r][u] = zero();
  }
  const auto step = [&](int d, auto&& elements) __attribute__((always_inline)) {
    Vec k[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) k[u] = elements(key[u] + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec q = load(query + r * query_stride + d / Math::PER_ELEMENT);
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) dot[r][u] = Math::multiply_add(q, k[u], dot[r][u]);
    }
  };
  int d = 0;
  for (; d + STEP <= key_dim; d += STEP)
    step(d, [](const auto* p) __attribute__((always_inline)) { return Math::elements(p); });
  if (d < key_dim)
    step(d, [=](const auto* p) __attribute__((always_inline)) { return Math::elements(p, key_dim - d); });
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) out[r * W + u] = dot[r][u];
}

// C vectors of columns: sums[r] += weights[r][key] * value[key] for n keys.
template <class T, int R, int C>
INLINE void add_values(const T* values, const int64_t* slots, const int64_t* next_slots, int n, int64_t value_dim,
                       int columns, const float* weights, float* sums, int64_t sums_stride) {
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sum[r][c] = load(sums + r * sums_stride + c * W);
  for (int key = 0; key < n; key++) {
    const T* from = values + slots[key] * value_dim;
    if (next_slots) fetch(values + next_slots[key] * value_dim, C * W * sizeof(T));
    Vec value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) value[c] = columns == C * W ? load(from + c * W) : load(from + c * W, columns - c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec weight = set(weights[r * FEW_KEYS + key]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sum[r][c] = fma(weight, value[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(sums + r * sums_stride + c * W, sum[r][c]);
}

// How many keys, and vectors of columns, are in flight for R rows: as many as the registers hold.
constexpr int keys_in_flight(int rows) { return W == 16 ? (rows <= 2 ? 8 : rows <= 4 ? 4 : 2) : (rows <= 2 ? 4 : 2); }
constexpr int columns_in_flight(int rows) {
  return W == 16 ? (rows <= 4 ? 4 : 2) : (rows <= 2 ? 4 : rows <= 4 ? 2 : 1);
}

// The pieces of scratch memory: packed queries, weights and sums of each row.
struct FewRowsScratch {
  int64_t query_stride, sums_stride;
  float *query, *weights, *sums;

  FewRowsScratch(const AttentionArgs& args, float* scratch)
      : query_stride(round_up(args.key_dim, W)), sums_stride(round_up(args.value_dim, W)), query(scratch),
        weights(query + FEW_ROWS * query_stride), sums(weights + FEW_ROWS * FEW_KEYS) {}
  int64_t size() const { return FEW_ROWS * (query_stride + FEW_KEYS + sums_stride); }
};

// Multiplies dot products with codes, or weights of codes, by the scales of these.
template <class T, int R>
INLINE void scale_rows(const FewRowsScratch& memory, const f16* scales, const int64_t* slots) {
  const Scales<T, FEW_KEYS> all(scales, slots);
  for (int i = 0; i < FEW_KEYS; i += W) {
    const Vec scale = all.from(i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      float* row = memory.weights + r * FEW_KEYS + i;
      store(row, mul(load(row), scale));
    }
  }
}

template <class Math, int R>
INLINE void score_chunk(const AttentionArgs& args, const FewRowsScratch& memory, const int64_t* slots,
                        const int64_t* next_slots, int n) {
  typedef typename Math::Cache T;
  constexpr int U = keys_in_flight(R);
  const T* keys = (const T*)args.key_cache;
  for (int first = 0; first < n; first += W) {
    Vec partial[R * W];
#pragma GCC unroll 1
    for (int key = first; key < first + W; key += U) {
      if (next_slots)
        for (int u = 0; u < U; u++) fetch(keys + next_slots[key + u] * args.key_dim, args.key_dim * sizeof(T));
      partial_dots<Math, R, U>(keys, slots + key, args.key_dim, memory.query, memory.query_stride,
                               partial + key - first);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) store(memory.weights + r * FEW_KEYS + first, sums(partial + r * W));
  }
  if constexpr (Codes<T>::ARE) scale_rows<T, R>(memory, args.key_scales, slots);
}

template <class T, int R>
INLINE void add_chunk(const AttentionArgs& args, const FewRowsScratch& memory, const int64_t* slots,
                      const int64_t* next_slots, int n) {
  constexpr int C = columns_in_flight(R);
  const T* values = (const T*)args.value_cache;
  if constexpr (Codes<T>::ARE) scale_rows<T, R>(memory, args.value_scales, slots);
  int d = 0;
  for (; d + C * W <= args.value_dim; d += C * W)
    add_values<T, R, C>(values + d, slots, next_slots, n, args.value_dim, C * W, memory.weights,
                        memory.sums + d, memory.sums_stride);
  for (; d < args.value_dim; d += W)
    add_values<T, R, 1>(values + d, slots, next_slots, n, args.value_dim, at_most(args.value_dim - d, W),
                        memory.weights, memory.sums + d, memory.sums_stride);
}

// Asks for all of a chunk at once: the first one, which nothing was done before.
template <class T>
INLINE void fetch_chunk(const AttentionArgs& args, const int64_t* slots) {
  const T *keys = (const T*)args.key_cache, *values = (const T*)args.value_cache;
  for (int i = 0; i < FEW_KEYS; i++) fetch(keys + slots[i] * args.key_dim, args.key_dim * sizeof(T));
  for (int i = 0; i < FEW_KEYS; i++) fetch(values + slots[i] * args.value_dim, args.value_dim * sizeof(T));
}

template <class T>
INLINE void fetch_scales(const AttentionArgs& args, const int64_t* slots) {
  if constexpr (Codes<T>::ARE) {
    Scales<T, FEW_KEYS>::fetch(args.key_scales, slots);
    Scales<T, FEW_KEYS>::fetch(args.value_scales, slots);
  }
}

template <class Math, int R>
void few_rows_of(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const FewRowsScratch memory(args, scratch);
  const Scoring scoring(args);
  RowState states[R];
  const int num_rows = item.num_tokens * item.num_heads;
  for (int r = 0; r < R; r++) {  // rows beyond num_rows repeat the last one
    const int row = at_most(r, num_rows - 1);
    const int64_t at = item.tokens[row / item.num_heads] * args.query_stride +
                       (item.first_head + row % item.num_heads) * args.key_dim;
    Math::pack_query(memory.query + r * memory.query_stride, args.query, args.query_dtype, at, args.key_dim);
    states[r] = {LOWEST, 0};
    for (int64_t d = 0; d < memory.sums_stride; d += W) store(memory.sums + r * memory.sums_stride + d, zero());
  }
  KeyWalk walk(args, item);
  int64_t slots[2][FEW_KEYS];
  walk.next(slots[0], at_most(FEW_KEYS, item.end_key - item.first_key), FEW_KEYS);
  fetch_scales<typename Math::Cache>(args, slots[0]);
  fetch_chunk<typename Math::Cache>(args, slots[0]);
  int now = 0;
  for (int key = item.first_key; key < item.end_key; key += FEW_KEYS, now = !now) {
    const int n = at_most(FEW_KEYS, item.end_key - key), left = item.end_key - key - n;
    if (left > 0) {
      walk.next(slots[!now], at_most(FEW_KEYS, left), FEW_KEYS);
      fetch_scales<typename Math::Cache>(args, slots[!now]);
    }
    const int64_t* next_slots = left > 0 ? slots[!now] : nullptr;
    score_chunk<Math, R>(args, memory, slots[now], next_slots, n);
    for (int r = 0; r < R; r++) {
      const int row = at_most(r, num_rows - 1);
      const float* slope = args.alibi_slopes ? args.alibi_slopes + item.first_head + row % item.num_heads : nullptr;
      const float distance = (float)(key - item.positions[item.tokens[row / item.num_heads]]);
      const float factor = soften<FEW_KEYS / W>(memory.weights + r * FEW_KEYS, states[r], scoring, {0, n}, slope,
                                                distance);
      if (factor != 1) rescale(memory.sums + r * memory.sums_stride, memory.sums_stride, factor);
    }
    add_chunk<typename Math::Cache, R>(args, memory, slots[now], next_slots, n);
  }
  for (int row = 0; row < num_rows; row++)
    hand_over(args, item, row, states[row], memory.sums + row * memory.sums_stride);
}

template <class Math>
void few_rows(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  switch (item.num_tokens * item.num_heads) {
    case 1: return few_rows_of<Math, 1>(args, item, scratch);
    case 2: return few_rows_of<Math, 2>(args, item, scratch);
    case 3: return few_rows_of<Math, 3>(args, item, scratch);
    case 4: return few_rows_of<Math, 4>(args, item, scratch);
    case 5:
    case 6: return few_rows_of<Math, 6>(args, item, scratch);
    default: return few_rows_of<Math, 8>(args, item, scratch);
  }
}

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
