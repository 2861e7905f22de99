// The matrix unit (AMX): eight tiles of 16 rows of 64 bytes, and one instruction that multiplies two of them.
//
//   multiply<C, A, B>()      C[row][column] += sum over k of A[row][k] * B[k][column]
//
//     A   [16 rows][32 k]             bf16, row after row
//     B   [16 pairs of k][16][2]      bf16: the numbers of k = 2p and 2p + 1 lie side by side
//     C   [16 rows][16 columns]       float32
//
// Two implementations with the same names. The instructions; and, under HF_PAGED_EMULATE_AMX, the same arithmetic in
// plain C++ (tiles_emulated.h), by which machines without the unit test the kernels.
//
// The instructions are written out rather than taken from <immintrin.h>: GCC's own loads do not tell the compiler that
// they read memory (stores to a buffer that only a tile reads are dropped), and tile numbers must be macro arguments.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#ifdef HF_PAGED_EMULATE_AMX
#include "tiles_emulated.h"
#else

namespace hf_paged {
namespace tiles {

#define TILE_INLINE static inline __attribute__((always_inline))

constexpr int ROWS = 16;       // of any tile
constexpr int K = 32;          // bf16 numbers in a row
constexpr int COUNT = 8;       // tiles
constexpr int BYTES = 16 * 64;

// A thread configures before its first use of a tile and releases when it is done: while tiles are in use, the
// operating system saves 8 KB more at each switch. Both are cheap (tens of cycles), so that each work item does it.
TILE_INLINE void configure() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, unused[14] = {0};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
  } layout;
  __asm__ volatile("ldtilecfg (%0)" ::"r"(&layout) : "memory");
}

TILE_INLINE void release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int T>
TILE_INLINE void zero() {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}

// Sixteen rows of 64 bytes each, `stride` bytes apart.
template <int T>
TILE_INLINE void load(const void* from, int64_t stride) {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
TILE_INLINE void store(void* to, int64_t stride) {
  static_assert(T >= 0 && T < COUNT, "there are eight tiles");
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int C, int A, int B>
TILE_INLINE void multiply() {
  static_assert(C != A && C != B && A != B, "the instruction takes three different tiles");
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace tiles
}  // namespace hf_paged
#endif

namespace hf_paged {
namespace tiles {

// A row of a tile on its way through a vector register: 32 numbers, zero from `left` on; those are not read.
TILE_INLINE __m512i row(const void* from, int64_t left) {
  const __mmask32 some = left >= K ? ~0u : left > 0 ? (1u << left) - 1 : 0;
  return _mm512_maskz_loadu_epi16(some, from);
}

namespace {

// Tiles for the life of an object.
struct Configured {
  Configured() { configure(); }
  ~Configured() { release(); }
};

}  // namespace

// f(Index<0>), f(Index<1>), ..., f(Index<N - 1>): tile numbers must be known to the compiler.
template <int I>
struct Index {
  static constexpr int value = I;
};

template <int N, int I = 0, class F>
TILE_INLINE void each(const F& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    each<N, I + 1>(f);
  }
}

}  // namespace tiles
}  // namespace hf_paged
