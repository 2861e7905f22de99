// The tiles of tiles.h in plain C++, bit for bit as the instruction set reference describes TDPBF16PS.
//
// For each number of C: two sums from zero, one over the even k and one over the odd k, each a chain of fused
// multiply-adds; then C + (even + odd). Rounding to nearest even, denormals are zero on the way in and on the way out,
// whatever the processor's own settings are.
//
// Tiles that nobody configured hold NaN and stay so, and a kernel that forgets to configure fails its test.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace hf_paged {
namespace tiles {

#define TILE_INLINE static inline __attribute__((always_inline))

constexpr int ROWS = 16;
constexpr int K = 32;
constexpr int COUNT = 8;
constexpr int BYTES = 16 * 64;

struct State {
  alignas(64) uint8_t tile[COUNT][ROWS][64];
  bool configured = false;
  State() { memset(tile, 0xff, sizeof(tile)); }
};
static thread_local State state;

TILE_INLINE void configure() {
  memset(state.tile, 0, sizeof(state.tile));
  state.configured = true;
}

TILE_INLINE void release() {
  memset(state.tile, 0xff, sizeof(state.tile));
  state.configured = false;
}

template <int T>
TILE_INLINE void zero() {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  if (state.configured) memset(state.tile[T], 0, BYTES);
}

template <int T>
TILE_INLINE void load(const void* from, int64_t stride) {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  if (!state.configured) return;
  for (int row = 0; row < ROWS; row++) memcpy(state.tile[T][row], (const char*)from + row * stride, 64);
}

template <int T>
TILE_INLINE void store(void* to, int64_t stride) {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  for (int row = 0; row < ROWS; row++) memcpy((char*)to + row * stride, state.tile[T][row], 64);
}

static inline float widened(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

constexpr unsigned NEAREST_WITHOUT_DENORMALS = 0x9fc0;  // of the control register MXCSR, no exceptions

// Not inline: arithmetic must not move out from between the two changes of the processor's settings around the call.
static __attribute__((noinline)) void multiply_add(float c[ROWS][16], const uint16_t a[ROWS][K],
                                                   const uint16_t b[ROWS][16][2]) {
  for (int row = 0; row < ROWS; row++) {
    float even[16] = {0}, odd[16] = {0};
    for (int pair = 0; pair < 16; pair++) {
      const float first = widened(a[row][2 * pair]), second = widened(a[row][2 * pair + 1]);
      for (int column = 0; column < 16; column++) {
        even[column] = __builtin_fmaf(first, widened(b[pair][column][0]), even[column]);
        odd[column] = __builtin_fmaf(second, widened(b[pair][column][1]), odd[column]);
      }
    }
    for (int column = 0; column < 16; column++) c[row][column] += even[column] + odd[column];
  }
}

template <int C, int A, int B>
TILE_INLINE void multiply() {
  static_assert(C != A && C != B && A != B, "the instruction takes three different tiles");
  const unsigned settings = _mm_getcsr();
  _mm_setcsr(NEAREST_WITHOUT_DENORMALS);
  multiply_add((float(*)[16])state.tile[C], (const uint16_t(*)[K])state.tile[A],
               (const uint16_t(*)[16][2])state.tile[B]);
  _mm_setcsr(settings);
}

}  // namespace tiles
}  // namespace hf_paged
