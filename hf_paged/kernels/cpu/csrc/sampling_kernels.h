// Choosing a token of a row of scores, without sorting the row.
//
//     scores   | 3 1 9 2 | 0 4 1 1 | 7 7 2 5 | 1 |      cut into chunks (the last may be shorter)
//     maxima   |    9    |    4    |    7    | 1 |      one pass at memory speed
//     >= 6     | read    |         | read    |   |      only these chunks are read again
//     entries    9:2  7:8  7:9                          sorted, largest first, equal ones by column
//
// A threshold that no token below can pass is known before anything is sorted: for top-k the k-th largest chunk maximum
// (k scores at least are as large), for min-p its share of the best one, for top-p see `draw_nucleus`.
#pragma once
#include "sampling.h"
#include "with_type.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

constexpr int64_t CHUNK = 128;
constexpr int64_t WIDE_CHUNK = 1024;  // where only the best score is asked for
constexpr int64_t SMALL_SORT = 32;
constexpr float LOWEST = -3.4028234663852886e38f;  // as a threshold it admits all but -inf

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ------------------------------------------------------------------ reading rows

// The scores from a column on; -inf past the end.
template <class T>
INLINE Vec load_scores(const T* row, int64_t column, int64_t end) {
  const int64_t left = end - column;
  if (left >= W) return load(row + column);
  return select_first((int)left, load(row + column, (int)left), set(-INFINITY));
}

template <class T>
INLINE float chunk_maximum(const T* row, int64_t begin, int64_t end, uint32_t& nan) {
  Vec high = set(-INFINITY);
  for (int64_t column = begin; column < end; column += W) {
    const Vec x = load_scores(row, column, end);
    nan |= is_nan(x);
    high = max(high, x);
  }
  return highest(high);
}

// Writes the maximum of each chunk, and returns the row's: NaN if it holds one.
template <class T>
static float chunk_maxima(const T* row, int64_t size, int64_t chunk, float* maxima) {
  uint32_t nan = 0;
  float best = -INFINITY;
  for (int64_t begin = 0; begin < size; begin += chunk) {
    const float high = chunk_maximum(row, begin, smaller(begin + chunk, size), nan);
    maxima[begin / chunk] = high;
    if (high > best) best = high;
  }
  return nan ? NAN : best;
}

template <class T>
static void best_of(const T* row, int64_t size, float* value, int64_t* column) {
  uint32_t nan = 0;
  float best = -INFINITY;
  int64_t place = 0;
  for (int64_t begin = 0; begin < size; begin += WIDE_CHUNK) {
    const float high = chunk_maximum(row, begin, smaller(begin + WIDE_CHUNK, size), nan);
    if (high > best) best = high, place = begin;
  }
  *value = nan ? NAN : best;
  *column = 0;
  if (nan) return;
  uint32_t found;
  while (!(found = at_least(load_scores(row, place, size), set(best)))) place += W;
  *column = place + __builtin_ctz(found);
}

// ------------------------------------------------------------------ order

// Integers that are in the opposite order of the numbers; both zeros are one.
INLINE uint32_t key_of(float value) {
  uint32_t bits;
  value += 0.f;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

INLINE float value_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key : ~key & 0x7fffffffu;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The k-th largest of some numbers, k from 1: digit after digit, the highest first.
static float kth_largest(const float* values, int64_t count, int64_t k) {
  uint32_t known = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {0};
    for (int64_t i = 0; i < count; i++) {
      const uint32_t key = key_of(values[i]);
      if ((key & mask) == known) counts[key >> shift & 255]++;
    }
    uint32_t digit = 0;
    for (; counts[digit] < k; digit++) k -= counts[digit];
    known |= digit << shift;
    mask |= 255u << shift;
  }
  return value_of(known);
}

// An entry is a score's key above its column.
INLINE float value_at(const uint64_t* entries, int64_t i) { return value_of((uint32_t)(entries[i] >> 32)); }
INLINE int64_t column_at(const uint64_t* entries, int64_t i) { return (int64_t)(entries[i] & 0xffffffffu); }

static void insertion_sort(uint64_t* entries, int64_t count) {
  for (int64_t i = 1; i < count; i++) {
    const uint64_t entry = entries[i];
    int64_t j = i;
    for (; j > 0 && entries[j - 1] > entry; j--) entries[j] = entries[j - 1];
    entries[j] = entry;
  }
}

// Sorts entries that are in the order of their columns, by the key's bytes from the lowest; returns where they are then.
static const uint64_t* sort_entries(uint64_t* entries, uint64_t* spare, int64_t count) {
  if (count <= SMALL_SORT) {
    insertion_sort(entries, count);
    return entries;
  }
  for (int shift = 32; shift < 64; shift += 8) {
    int64_t places[256] = {0};
    for (int64_t i = 0; i < count; i++) places[entries[i] >> shift & 255]++;
    if (places[entries[0] >> shift & 255] == count) continue;  // 16-bit scores: half of the bytes
    int64_t sum = 0;
    for (int64_t& place : places) {
      const int64_t here = place;
      place = sum;
      sum += here;
    }
    for (int64_t i = 0; i < count; i++) spare[places[entries[i] >> shift & 255]++] = entries[i];
    uint64_t* sorted = spare;
    spare = entries;
    entries = sorted;
  }
  return entries;
}

// Lists the scores that are at least a threshold (not -inf), by column; `maxima` are those of chunks of CHUNK.
template <class T>
static int64_t entries_above(const T* row, int64_t size, const float* maxima, float threshold, uint64_t* entries) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    if (maxima[begin / CHUNK] < threshold) continue;
    const int64_t end = smaller(begin + CHUNK, size);
    for (int64_t column = begin; column < end; column += W) {
      const Vec x = load_scores(row, column, end);
      uint32_t found = at_least(x, set(threshold));
      if (!found) continue;
      float values[W];
      store(values, x);
      for (; found; found &= found - 1) {
        const int lane = __builtin_ctz(found);
        entries[count++] = (uint64_t)key_of(values[lane]) << 32 | (uint64_t)(column + lane);
      }
    }
  }
  return count;
}

// A number that is at most the k-th largest score, and not much less. `maxima` hold those of chunks of CHUNK, and are
// made anew of smaller chunks in `room` where k is too large for them to say much.
template <class T>
static float top_k_threshold(const T* row, int64_t size, int64_t k, const float* maxima, float* room) {
  if (k * CHUNK * 5 / 4 <= size) return fmaxf(kth_largest(maxima, (size + CHUNK - 1) / CHUNK, k), LOWEST);
  if (k * 16 * 5 / 4 <= size) {
    chunk_maxima(row, size, 16, room);
    return fmaxf(kth_largest(room, (size + 15) / 16, k), LOWEST);
  }
  for (int64_t column = 0; column < size; column += W) {
    store(room + column, load_scores(row, column, size), (int)smaller(W, size - column));
  }
  return fmaxf(kth_largest(room, size, k), LOWEST);
}

// ------------------------------------------------------------------ weights

// Sums exp((score - best) * scale) over a chunk.
template <class T>
INLINE float chunk_weight(const T* row, int64_t begin, int64_t end, float best, float scale) {
  const Vec high = set(best), factor = set(scale * 1.44269504089f);
  Vec weights = zero();
  for (int64_t column = begin; column < end; column += W) {
    weights = add(weights, exp2(mul(sub(load_scores(row, column, end), high), factor)));
  }
  return sum(weights);
}

template <class T>
static double row_weight(const T* row, int64_t size, float best, float scale) {
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    total += chunk_weight(row, begin, smaller(begin + CHUNK, size), best, scale);
  }
  return total;
}

// The first place whose running sum exceeds a target, or the last place.
INLINE int64_t place_of(const double* cumulative, int64_t count, double target) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cumulative[middle] > target) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ------------------------------------------------------------------ drawing

// Any token: first the chunk, then the token in it.
template <class T>
static int64_t draw_any(const T* row, int64_t size, float best, double temperature, double uniform, double* cumulative) {
  const float scale = (float)(1 / temperature);
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    total += chunk_weight(row, begin, smaller(begin + CHUNK, size), best, scale);
    cumulative[begin / CHUNK] = total;
  }
  const double target = uniform * total;
  const int64_t chunk = place_of(cumulative, (size + CHUNK - 1) / CHUNK, target);
  const double before = chunk ? cumulative[chunk - 1] : 0, share = (target - before) / (cumulative[chunk] - before);

  const int64_t begin = chunk * CHUNK, count = smaller(CHUNK, size - begin);
  float values[CHUNK];
  double inside[CHUNK], sum = 0;
  int64_t last = 0;  // the last token that has any weight
  for (int64_t i = 0; i < count; i += W) store(values + i, load_scores(row, begin + i, size));
  for (int64_t i = 0; i < count; i++) {
    const double weight = exp(((double)values[i] - best) / temperature);
    inside[i] = sum += weight;
    if (weight > 0) last = i;
  }
  return begin + smaller(place_of(inside, count, share * sum), last);
}

struct Remaining {
  int64_t count;  // tokens that remain, at least 1
  bool is_whole;  // whether no token below the entries can remain
};

// Top-k, top-p and min-p over sorted entries, in this order. `total` is the weight that top-p takes its share of: all
// of the row, or 0 for that of the entries that top-k leaves. Equal scores at the border of top-k all remain.
static Remaining cut(const uint64_t* entries, int64_t count, const DrawSettings& settings, double total,
                     double* cumulative) {
  int64_t kept = count;
  if (settings.top_k > 0 && settings.top_k < (double)count) {
    kept = (int64_t)settings.top_k;
    while (kept < count && entries[kept] >> 32 == entries[kept - 1] >> 32) kept++;
  }
  const double best = value_at(entries, 0), limit = settings.top_p < 1 ? settings.top_p * total : INFINITY;
  double sum = 0;
  int64_t probable = 0, done = 0;  // how many are probable enough for min-p
  for (; done < kept; done++) {
    if (total > 0 && sum >= limit) break;
    const double weight = exp((value_at(entries, done) - best) / settings.temperature);
    if (!(weight > 0)) break;
    cumulative[done] = sum += weight;
    if (weight >= settings.min_p) probable = done + 1;
    else if (total > 0) break;
  }
  if (total > 0) return {probable, done < kept || settings.top_p >= 1};
  int64_t nucleus = settings.top_p < 1 ? 1 : probable;
  while (nucleus < probable && cumulative[nucleus - 1] < settings.top_p * sum) nucleus++;
  return {nucleus, true};
}

// The least score of a token that weighs so much, a little lower so that rounding cannot matter.
INLINE float threshold_of(double weight, float best, double temperature) {
  const double score = best + temperature * log(weight < 1 ? weight : 1) - 1e-5 * (1 + fabs((double)best));
  return score > LOWEST ? (float)score : LOWEST;
}

INLINE int64_t chosen(const uint64_t* entries, const double* cumulative, int64_t count, double uniform) {
  return column_at(entries, place_of(cumulative, count, uniform * cumulative[count - 1]));
}

// Top-p without top-k, and min-p. All tokens below (1 - p) / size of the row's weight together weigh less than 1 - p;
// but mostly a few tokens hold the share p, so higher thresholds are tried first.
template <class T>
static int64_t draw_nucleus(const T* row, int64_t size, float best, const DrawSettings& settings, double uniform,
                            const DrawScratch& scratch) {
  const bool is_nucleus = settings.top_p < 1;
  const double total = is_nucleus ? row_weight(row, size, best, (float)(1 / settings.temperature)) : 1;
  const double dropped = is_nucleus ? (1 - settings.top_p) * total : 0;
  const double guesses[] = {dropped / 32, dropped / 512, dropped / 8192, dropped / (2. * (double)size)};
  Remaining remaining = {1, false};
  const uint64_t* entries = scratch.entries;
  for (int i = 0; i < 4 && !remaining.is_whole; i++) {
    const double least = guesses[i] > settings.min_p ? guesses[i] : settings.min_p;
    const float threshold = threshold_of(least, best, settings.temperature);
    const int64_t count = entries_above(row, size, scratch.maxima, threshold, scratch.entries);
    entries = sort_entries(scratch.entries, scratch.spare, count);
    remaining = cut(entries, count, settings, total, scratch.cumulative);
    remaining.is_whole |= guesses[i] <= settings.min_p;
  }
  return chosen(entries, scratch.cumulative, remaining.count, uniform);
}

template <class T>
static int64_t draw_truncated(const T* row, int64_t size, float best, const DrawSettings& settings, double uniform,
                              const DrawScratch& scratch) {
  if (!(settings.top_k > 0)) return draw_nucleus(row, size, best, settings, uniform, scratch);
  float* room = (float*)scratch.cumulative;
  const int64_t k = settings.top_k < (double)size ? (int64_t)settings.top_k : size;
  const float threshold = top_k_threshold(row, size, k, scratch.maxima, room);
  const int64_t count = entries_above(row, size, scratch.maxima, threshold, scratch.entries);
  const uint64_t* entries = sort_entries(scratch.entries, scratch.spare, count);
  return chosen(entries, scratch.cumulative, cut(entries, count, settings, 0, scratch.cumulative).count, uniform);
}

template <class T>
static void draw_row(const T* row, int64_t size, const DrawSettings& settings, double uniform,
                     const DrawScratch& scratch, float* value, int64_t* column) {
  if (settings.kind == DRAW_BEST) return best_of(row, size, value, column);
  const float best = *value = chunk_maxima(row, size, CHUNK, scratch.maxima);
  *column = 0;
  if (!(best >= LOWEST && best < INFINITY)) return;
  if (settings.kind == DRAW_ANY) {
    *column = draw_any(row, size, best, settings.temperature, uniform, scratch.cumulative);
  } else {
    *column = draw_truncated(row, size, best, settings, uniform, scratch);
  }
}

// ------------------------------------------------------------------ log-probabilities

template <class T>
static void measure_row(const T* row, int64_t size, int64_t column, float* log_sum, int64_t* num_larger) {
  float best, given[W];
  int64_t place, count = 0;
  best_of(row, size, &best, &place);
  store(given, load_scores(row, column, column + 1));
  *log_sum = (float)(best + log(row_weight(row, size, best, 1)));
  for (int64_t i = 0; i < size; i += W) count += __builtin_popcount(above(load_scores(row, i, size), set(given[0])));
  *num_larger = count;
}

template <class T>
static void largest_of(const T* row, int64_t size, int64_t k, const DrawScratch& scratch, float* values,
                       int64_t* columns) {
  chunk_maxima(row, size, CHUNK, scratch.maxima);
  const float threshold = top_k_threshold(row, size, smaller(k, size), scratch.maxima, (float*)scratch.cumulative);
  const int64_t count = entries_above(row, size, scratch.maxima, threshold, scratch.entries);
  const uint64_t* entries = sort_entries(scratch.entries, scratch.spare, count);
  for (int64_t i = 0; i < k; i++) {
    values[i] = i < count ? value_at(entries, i) : -INFINITY;
    columns[i] = i < count ? column_at(entries, i) : 0;
  }
}

// ------------------------------------------------------------------ dtypes

// Calls work with a pointer of the scores' type.
template <class Work>
INLINE void with_row(const Scores& scores, int64_t row, const Work& work) {
  with_type(scores.dtype, [&](auto of_type) {
    work((const decltype(of_type)*)scores.data + row * scores.stride);
  });
}

static void best(const Scores& scores, int64_t row, float* value, int64_t* column) {
  with_row(scores, row, [&](const auto* data) { best_of(data, scores.size, value, column); });
}

static void draw(const Scores& scores, int64_t row, const DrawSettings& settings, double uniform,
                 const DrawScratch& scratch, float* value, int64_t* column) {
  with_row(scores, row, [&](const auto* data) {
    draw_row(data, scores.size, settings, uniform, scratch, value, column);
  });
}

static void measure(const Scores& scores, int64_t row, int64_t column, float* log_sum, int64_t* num_larger) {
  with_row(scores, row, [&](const auto* data) { measure_row(data, scores.size, column, log_sum, num_larger); });
}

static void largest(const Scores& scores, int64_t row, int64_t k, const DrawScratch& scratch, float* values,
                    int64_t* columns) {
  with_row(scores, row, [&](const auto* data) { largest_of(data, scores.size, k, scratch, values, columns); });
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
