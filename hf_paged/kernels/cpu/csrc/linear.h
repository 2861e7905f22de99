// y = x W^T with what comes before and after it, on nn.Linear's own row-major weights.
//
// Dense weights are never repacked; quantized ones come in packed rows. Two ways to multiply, by the number of tokens:
//
//   few    dot products along k: 16 sums at a time (16 rows x 1 token, 8 x 2 or 4 x 4), reduced at the end.
//          Reads the weights once, in order: bound by memory bandwidth.
//   many   the activations are packed once per call so that a vector holds one k of 16 tokens; a number of the
//          weights, broadcast, multiplies it. Bound by arithmetic.
//
//          packed x, a block of `width` tokens          f32    [k][width]
//                                                       pairs  [k / 2][width][2]  bf16, zero where k is odd
//
// A work item is a chunk of output columns: its sums go to a small tile [token][column], then to y through the epilogue.
#pragma once
#include "activation.h"
#include "dtype.h"
#include "isa.h"

namespace hf_paged {

// Rows of a projection. Row r lies at `weight + (r / rows_per_block) * block_stride + (r % rows_per_block) * row_stride`,
// in elements: a fused projection that interleaves q, k and v head by head is three such parts of one weight.
struct LinearPart {
  const void* weight = nullptr;
  int64_t num_rows = 0;
  int64_t row_stride = 0;
  int64_t rows_per_block = INT64_MAX;
  int64_t block_stride = 0;
  DType dtype = DType::f32;
  int64_t group = 0;           // packed rows: numbers that share a scale
  const void* bias = nullptr;  // [num_rows], blocks as above with stride 1
  int64_t bias_block_stride = 0;
  DType bias_dtype = DType::f32;
};

struct LinearArgs {
  const void* x = nullptr;  // [num_tokens, k]
  int64_t x_stride = 0;
  DType x_dtype = DType::f32;
  int64_t num_tokens = 0, k = 0;
  LinearPart parts[3];  // one after the other in y; or, if `gated`, gate and up
  int num_parts = 1;
  bool gated = false;  // y = activation(x gate^T) * (x up^T)
  Activation activation = Activation::identity;
  const void* residual = nullptr;  // y = residual + residual_scale * (...); may be y itself
  int64_t residual_stride = 0;
  DType residual_dtype = DType::f32;
  float residual_scale = 1;
  void* y = nullptr;  // [num_tokens, all rows]
  int64_t y_stride = 0;
  DType y_dtype = DType::f32;
  // Between two linears of `linear_pair`: blocks of tokens as `pack` makes them, instead of the same tokens in x or y.
  const char* packed_x = nullptr;
  char* packed_y = nullptr;
};

constexpr int COLUMNS = 48;        // output columns of a work item at most, a multiple of 16
constexpr int MAX_WIDTH = 64;      // tokens of a packed block at most
constexpr int FEW_TOKENS = 4;      // tokens whose sums are kept in registers together
constexpr int MAX_FEW_TOKENS = 8;  // tokens that `few` takes at most

// One product of weight rows with tokens.
struct LinearTile {
  const void* const* rows;  // `num_rows` pointers
  int num_rows;             // at most COLUMNS
  int64_t row_stride;       // elements between them if they are equally far apart, else 0
  int64_t k, group;         // group: of packed rows
  const void* x;      // many: a packed block; few: rows of `x_stride` numbers, zero from k on
  int64_t x_stride;   // few only; in bytes where activations are quantized
  int num_tokens;     // many: the block's width; few: tokens, at most MAX_FEW_TOKENS
  float* out;         // many: out[column * MAX_WIDTH + token]; few: out[token * COLUMNS + column]
  void* scratch;      // num_rows * k float32, k rounded up to 32, and 64 KB more
};

// Activations on their way into `few` or `many`.
struct PackArgs {
  const void* x;
  int64_t x_stride;
  DType x_dtype;
  int64_t first, count;  // tokens; many: as many as a vector has lanes, at most
  int64_t k;
  void* out;      // many: where the first of them belongs in its block
  int64_t width;  // many: of the block; few: numbers in a row of `out`, or its bytes where activations are quantized
};

struct LinearKernels {
  int lanes;      // widths are multiples of this
  int max_width;  // and at most this
  int max_few;    // a remainder of more tokens, at most MAX_FEW_TOKENS, is faster as a padded block
  bool pairs;     // packed and copied activations are bf16
  void (*pack)(const PackArgs&);                       // for `many`
  void (*copy)(const PackArgs&);                       // for `few`
  void (*many[NUM_WEIGHT_DTYPES])(const LinearTile&);
  void (*few[NUM_WEIGHT_DTYPES])(const LinearTile&);
  // Packed rows as `many` takes them most quickly, in 4 bytes for each k rounded up to 32, in scratch; or null. As
  // float32 they are worth it for several blocks; where activations are quantized, `many` takes no others.
  void (*widen[NUM_WEIGHT_DTYPES])(const LinearTile&);
  int64_t code_bytes;  // of a number of x where activations are quantized (linear_w8a8.h), else 0
};

// Sums of a chunk of columns, on their way into y. Biases are float32, COLUMNS of them.
struct LinearOutput {
  float* tile;           // as `many` (for `pack`) or as `few` (for `finish`) leaves them; overwritten
  const float* up_tile;  // gated only
  const float* bias;     // or null
  const float* up_bias;
  int64_t first_token, num_tokens, first_column;
  int num_columns;
};

struct LinearEpilogue {
  void (*turn)(const float* sums, int num_columns, int64_t num_tokens, float* out);  // from the order of many to that of few
  void (*finish)(const LinearArgs&, const LinearOutput&);
  void (*pack)(const LinearArgs&, const LinearOutput&, void* block, int64_t width, bool pairs);  // of packed_y
};

extern const LinearKernels linear_avx2, linear_avx512, linear_avx512bf16, linear_amx;
extern const LinearKernels linear_w8a8_avx2, linear_w8a8_avx512, linear_w8a8_avx512vnni;
extern const LinearEpilogue linear_epilogue_avx2, linear_epilogue_avx512;

// float32 arithmetic, unless all weights are bf16, which have choices.
inline const LinearKernels& linear_kernels(const LinearArgs& args) {
  const Isa isa = current_isa();
  if (args.parts[0].dtype == DType::w8a8) {  // and so are the others
    if (isa < Isa::avx512) return linear_w8a8_avx2;
    return has_vnni() ? linear_w8a8_avx512vnni : linear_w8a8_avx512;
  }
  if (isa < Isa::avx512) return linear_avx2;
  for (int i = 0; i < args.num_parts; i++)
    if (args.parts[i].dtype != DType::bf16) return linear_avx512;
  if (isa == Isa::amx) return linear_amx;
  return prefers_bf16_dot() ? linear_avx512bf16 : linear_avx512;
}

inline const LinearEpilogue& linear_epilogue() {
  return current_isa() < Isa::avx512 ? linear_epilogue_avx2 : linear_epilogue_avx512;
}

// Runs on torch's threads.
void linear(const LinearArgs& args);

// Tokens that are packed at a time: those of more would leave a core's cache, read again for every item.
constexpr int64_t TOKENS_PER_CALL = 256;

// Two linears, the second of which reads nothing but what the first writes: an MLP. What lies between never becomes
// rows, where both use the same arithmetic; y of the first is memory for TOKENS_PER_CALL of them, or for all if there
// are fewer.
void linear_pair(const LinearArgs& first, const LinearArgs& second);

}  // namespace hf_paged
