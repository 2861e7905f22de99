// The host's side of linear.h: packs the activations, cuts the output into work items.
#include "linear.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "op.h"

namespace hf_paged {
namespace {

constexpr int64_t MIN_ITEMS_PER_THREAD = 4;

// Memory that a thread keeps: fresh pages would have to be faulted in at every call.
float* scratch(std::vector<float>& kept, int64_t count) {
  if ((int64_t)kept.size() < count + 16) kept.resize(count + 16);
  return (float*)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63);
}

// Pointers to the rows first ... first + count - 1.
void find_rows(const LinearPart& part, int64_t first, int count, const void** rows) {
  int64_t block = first / part.rows_per_block, row = first - block * part.rows_per_block;
  for (int i = 0; i < count; i++) {
    rows[i] = (const char*)part.weight + (block * part.block_stride + row * part.row_stride) * size_of(part.dtype);
    if (++row < part.rows_per_block) continue;
    row = 0;
    block++;
  }
}

float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

float of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | rest << 13);
  // Multiplying by 2^112 moves the exponent's bias, of numbers below the smallest normal one too.
  return of_bits(sign | rest << 13) * of_bits(0x77800000);
}

float widened(DType dtype, const void* p, int64_t i) {
  if (dtype == DType::f32) return ((const float*)p)[i];
  const uint16_t bits = ((const uint16_t*)p)[i];
  return dtype == DType::f16 ? of_half(bits) : of_bits((uint32_t)bits << 16);
}

// The tokens: blocks of at most `max_width` for `many`, and the rest for `few`.
struct Split {
  int64_t num_many, num_few;
  Split(int64_t num_tokens, const LinearKernels& kernels) {
    const int64_t rest = num_tokens % kernels.lanes;
    num_few = num_tokens <= kernels.max_few ? num_tokens : rest <= kernels.max_few ? rest : 0;
    num_many = num_tokens - num_few;
  }
};

// Of a packed or copied number of x.
int64_t number_bytes(const LinearKernels& kernels) {
  return kernels.code_bytes ? kernels.code_bytes : kernels.pairs ? 2 : 4;
}

// A block of packed tokens, as wide as blocks are at most.
int64_t block_bytes(int64_t k, const LinearKernels& kernels) {
  const int64_t scales = kernels.code_bytes ? 2 * sizeof(float) * kernels.max_width : 0;
  return (k + 31) / 32 * 32 * kernels.max_width * number_bytes(kernels) + scales;
}

// A row of copied tokens.
int64_t row_bytes(int64_t k, const LinearKernels& kernels) {
  return (k + 31) / 32 * 32 * number_bytes(kernels) + (kernels.code_bytes ? 64 : 0);
}

// Of all blocks that a call reads.
int64_t packed_bytes(const LinearArgs& args) {
  const LinearKernels& kernels = linear_kernels(args);
  const int64_t num_many = Split(args.num_tokens, kernels).num_many;
  return (num_many + kernels.max_width - 1) / kernels.max_width * block_bytes(args.k, kernels);
}

class Call {
 public:
  explicit Call(const LinearArgs& args)
      : a(args), kernels(linear_kernels(args)), epilogue(linear_epilogue()), split(a.num_tokens, kernels) {
    padded_k = (a.k + 31) / 32 * 32;
    num_blocks = (split.num_many + kernels.max_width - 1) / kernels.max_width;
    const int64_t few_bytes = split.num_few * row_bytes(a.k, kernels);
    few_stride = kernels.code_bytes ? row_bytes(a.k, kernels) : padded_k;
    static thread_local std::vector<float> kept;
    copied = (char*)scratch(kept, ((a.packed_x ? 0 : packed_bytes(a)) + few_bytes) / 4 + 16);
    packed = a.packed_x ? a.packed_x : copied + few_bytes;
    for (int i = 0; i < a.num_parts; i++) num_columns += a.parts[i].num_rows;
    if (a.gated) num_columns = a.parts[0].num_rows;
    columns = COLUMNS;
    const int64_t wanted = MIN_ITEMS_PER_THREAD * torch::stable::get_num_threads();
    while (columns > 16 && num_columns / columns < wanted) columns -= 16;
  }

  void run() {
    const int64_t num_groups = a.packed_x ? 0 : (split.num_many + kernels.lanes - 1) / kernels.lanes;
    Team::loop(num_groups + (split.num_few > 0), [&](int64_t i) { i < num_groups ? pack_group(i) : copy_few(); });
    // An item never crosses from one part into the next.
    std::vector<Item> items;
    int64_t first = 0;
    for (int p = 0; p < (a.gated ? 1 : a.num_parts); first += a.parts[p++].num_rows)
      for (int64_t row = 0; row < a.parts[p].num_rows; row += columns)
        items.push_back({p, row, first + row, (int)std::min<int64_t>(columns, a.parts[p].num_rows - row)});
    Team::loop((int64_t)items.size(), [&](int64_t i) { compute(items[i]); });
  }

 private:
  struct Item {
    int part;
    int64_t row, column;
    int num_columns;
  };

  // Packs the tokens that fill one vector.
  void pack_group(int64_t group) const {
    const int64_t first = group * kernels.lanes, block = first / kernels.max_width, start = block * kernels.max_width;
    PackArgs p{a.x, a.x_stride, a.x_dtype, first, 0, a.k, nullptr, 0};
    p.count = std::min<int64_t>(kernels.lanes, split.num_many - first);
    p.width = width_of(std::min<int64_t>(kernels.max_width, split.num_many - start));
    p.out = (char*)packed + block * block_bytes(a.k, kernels) + (first - start) * 4;  // a token is a float, or a pair of bf16
    kernels.pack(p);
  }

  void copy_few() const {
    kernels.copy({a.x, a.x_stride, a.x_dtype, split.num_many, split.num_few, a.k, copied, few_stride});
  }

  int64_t width_of(int64_t count) const { return (count + kernels.lanes - 1) / kernels.lanes * kernels.lanes; }

  void compute(const Item& item) const {
    static thread_local std::vector<float> kept;
    constexpr int64_t tile_size = MAX_WIDTH * COLUMNS, sums_size = MAX_WIDTH * (COLUMNS + 16);
    const int64_t rows_size = COLUMNS * padded_k;
    float* tile = scratch(kept, 2 * (tile_size + sums_size) + (1 << 14) + 3 * rows_size);
    float *sums = tile + 2 * tile_size, *wide = sums + 2 * sums_size, *rest = wide + 2 * rows_size;
    const int64_t read_at_once = block_bytes(a.k, kernels), written_at_once = block_bytes(num_columns, kernels);
    const void *rows[2][COLUMNS], *wide_rows[2][COLUMNS];
    float bias[2][COLUMNS];
    LinearOutput out{tile, tile + tile_size, nullptr, nullptr, 0, 0, item.column, item.num_columns};
    LinearTile t{nullptr, item.num_columns, 0, a.k, 0, nullptr, few_stride, 0, nullptr, rest};
    int64_t strides[2];
    bool is_wide[2];
    for (int i = 0; i < (a.gated ? 2 : 1); i++) {
      const LinearPart& part = a.parts[item.part + i];
      find_rows(part, item.row, item.num_columns, rows[i]);
      const bool whole = item.row / part.rows_per_block == (item.row + item.num_columns - 1) / part.rows_per_block;
      strides[i] = whole ? part.row_stride : 0;
      if (part.bias) (i ? out.up_bias : out.bias) = biases(part, item, bias[i]);
      is_wide[i] = kernels.widen[(int)part.dtype] && (num_blocks > 1 || (num_blocks > 0 && kernels.code_bytes));
      if (is_wide[i]) widen(part, rows[i], item.num_columns, wide + i * rows_size, wide_rows[i]);
    }
    for (int64_t block = 0; block <= num_blocks; block++) {
      const bool few = block == num_blocks;
      if (few && split.num_few == 0) break;
      out.first_token = few ? split.num_many : block * kernels.max_width;
      out.num_tokens = few ? split.num_few : std::min<int64_t>(kernels.max_width, split.num_many - out.first_token);
      const int64_t width = width_of(out.num_tokens);
      t.x = few ? copied : packed + block * read_at_once;
      t.num_tokens = (int)(few ? split.num_few : width);
      out.tile = few || !a.packed_y ? tile : sums;
      out.up_tile = few || !a.packed_y ? tile + tile_size : sums + sums_size;
      for (int i = 0; i < (a.gated ? 2 : 1); i++) {
        const bool use_wide = is_wide[i] && !few;
        const DType dtype = use_wide && !kernels.code_bytes ? DType::f32 : a.parts[item.part + i].dtype;
        t.rows = use_wide ? wide_rows[i] : rows[i];
        t.row_stride = strides[i];
        t.group = a.parts[item.part + i].group;
        t.out = few ? tile + i * tile_size : sums + i * sums_size;
        (few ? kernels.few : kernels.many)[(int)dtype](t);
        if (!few && !a.packed_y) epilogue.turn(t.out, t.num_rows, width, tile + i * tile_size);
      }
      if (few || !a.packed_y) epilogue.finish(a, out);
      else epilogue.pack(a, out, a.packed_y + block * written_at_once, width, kernels.pairs);
    }
  }

  // Widens the rows of an item once for all its blocks.
  void widen(const LinearPart& part, const void* const* rows, int count, float* to, const void** wide_rows) const {
    kernels.widen[(int)part.dtype]({rows, count, 0, a.k, part.group, nullptr, 0, 0, nullptr, to});
    for (int row = 0; row < count; row++) wide_rows[row] = to + row * padded_k;
  }

  const float* biases(const LinearPart& part, const Item& item, float* out) const {
    for (int c = 0; c < item.num_columns; c++) {
      const int64_t row = item.row + c, block = row / part.rows_per_block;
      out[c] = widened(part.bias_dtype, part.bias, block * part.bias_block_stride + row - block * part.rows_per_block);
    }
    for (int c = item.num_columns; c < COLUMNS; c++) out[c] = 0;
    return out;
  }

  const LinearArgs a;
  const LinearKernels& kernels;
  const LinearEpilogue& epilogue;
  const Split split;
  int64_t padded_k, few_stride, num_blocks, num_columns = 0, columns;
  const char* packed;
  char* copied;
};

// Some of the tokens.
LinearArgs part_of(const LinearArgs& args, int64_t first, int64_t count) {
  const auto at = [first](const void* p, int64_t stride, DType dtype) {
    return p ? (char*)p + first * stride * size_of(dtype) : nullptr;
  };
  LinearArgs part = args;
  part.num_tokens = count;
  part.x = at(args.x, args.x_stride, args.x_dtype);
  part.residual = at(args.residual, args.residual_stride, args.residual_dtype);
  part.y = at(args.y, args.y_stride, args.y_dtype);
  return part;
}

template <class Work>
void for_parts(int64_t num_tokens, const Work& work) {
  Team::run([&] {
    for (int64_t first = 0; first < num_tokens; first += TOKENS_PER_CALL)
      work(first, std::min(num_tokens - first, TOKENS_PER_CALL));
  });
}

}  // namespace

void linear(const LinearArgs& args) {
  for_parts(args.num_tokens, [&](int64_t first, int64_t count) { Call(part_of(args, first, count)).run(); });
}

void linear_pair(const LinearArgs& first, const LinearArgs& second) {
  static thread_local std::vector<float> kept;
  const LinearKernels& kernels = linear_kernels(second);
  const bool alike = &linear_kernels(first) == &kernels && !kernels.code_bytes;  // codes need the whole row
  for_parts(first.num_tokens, [&](int64_t begin, int64_t count) {
    LinearArgs a = part_of(first, begin, count), b = part_of(second, begin, count);
    a.y = first.y;
    b.x = second.x;
    if (alike) b.packed_x = a.packed_y = (char*)scratch(kept, packed_bytes(b) / 4);
    Call(a).run();
    Call(b).run();
  });
}

}  // namespace hf_paged
