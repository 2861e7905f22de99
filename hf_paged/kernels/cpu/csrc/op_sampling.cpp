// Operators that choose tokens: torch.ops.hf_paged.argmax_tokens, draw_tokens, measure_tokens, largest_tokens and
// philox_uniforms. Rows are shared out over the threads; a row's result depends on nothing but the row.
#include <stdint.h>

#include <memory>
#include <tuple>

#include "op.h"
#include "sampling.h"

namespace hf_paged {
namespace {

using torch::headeronly::ScalarType;

Scores scores_of(const Tensor& scores) {
  STD_TORCH_CHECK(current_isa() != Isa::none, "sampling: this machine has no native operators");
  STD_TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, "sampling: scores must be [rows, vocab_size]");
  STD_TORCH_CHECK(scores.stride(1) == 1 || scores.size(1) == 1, "sampling: rows of scores must be contiguous");
  STD_TORCH_CHECK(scores.size(1) <= INT32_MAX, "sampling: too many scores in a row");
  return {scores.const_data_ptr(), dtype_of(scores), scores.stride(0), scores.size(1)};
}

template <class T>
const T* data_of(const Tensor& tensor, ScalarType dtype, int64_t numel, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == numel, "sampling: `",
                  name, "` must be contiguous, with ", numel, " numbers of its dtype");
  return (const T*)tensor.const_data_ptr();
}

template <class T>
T* mutable_data(Tensor& tensor) { return (T*)tensor.mutable_data_ptr(); }

void check_settings(const DrawSettings* settings, const double* uniform, int64_t count) {
  for (int64_t row = 0; row < count; row++) {
    const DrawSettings& s = settings[row];
    if (s.kind == DRAW_BEST) continue;
    STD_TORCH_CHECK(s.kind == DRAW_ANY || s.kind == DRAW_TRUNCATED, "sampling: row ", row, " has no kind of draw");
    STD_TORCH_CHECK(s.temperature >= 1e-30 && s.temperature <= 1e30 && uniform[row] > 0 && uniform[row] < 1,
                    "sampling: the temperature of row ", row, " must be from 1e-30 to 1e30, its number between 0 and 1");
    const bool truncates = (s.top_k == 0 || s.top_k >= 1) && s.top_p > 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p <= 1;
    STD_TORCH_CHECK(s.kind == DRAW_ANY || truncates, "sampling: top-k of row ", row, " must be 0 or at least 1, top-p in (0, 1] and min-p in [0, 1]");
  }
}

// A thread's room for rows of some size, kept for the next step. Memory that no row has used costs nothing.
DrawScratch scratch_of(int64_t size) {
  thread_local std::unique_ptr<uint64_t[]> room;
  thread_local int64_t room_size = 0;
  if (size > room_size) {
    room.reset(new uint64_t[4 * size]);
    room_size = size;
  }
  uint64_t* begin = room.get();
  return {(float*)begin, begin + size, begin + 2 * size, (double*)(begin + 3 * size)};
}

std::tuple<Tensor, Tensor> argmax_tokens(Tensor scores) {
  const Scores rows = scores_of(scores);
  const int64_t count = scores.size(0);
  Tensor tokens = torch::stable::new_empty(scores, {count}, ScalarType::Long);
  Tensor best = torch::stable::new_empty(scores, {count}, ScalarType::Float);
  float* values = mutable_data<float>(best);
  int64_t* columns = mutable_data<int64_t>(tokens);
  const SamplingKernels& kernels = sampling_kernels();
  Team::loop(count, [&](int64_t row) { kernels.best(rows, row, values + row, columns + row); });
  return {tokens, best};
}

std::tuple<Tensor, Tensor> draw_tokens(Tensor scores, Tensor settings, Tensor uniform) {
  const Scores rows = scores_of(scores);
  const int64_t count = scores.size(0);
  const int64_t width = sizeof(DrawSettings) / sizeof(double);
  const auto* drawn = (const DrawSettings*)data_of<double>(settings, ScalarType::Double, count * width, "settings");
  const double* numbers = data_of<double>(uniform, ScalarType::Double, count, "uniform");
  check_settings(drawn, numbers, count);
  Tensor tokens = torch::stable::new_empty(scores, {count}, ScalarType::Long);
  Tensor best = torch::stable::new_empty(scores, {count}, ScalarType::Float);
  float* values = mutable_data<float>(best);
  int64_t* columns = mutable_data<int64_t>(tokens);
  const SamplingKernels& kernels = sampling_kernels();
  Team::loop(count, [&](int64_t row) {
    kernels.draw(rows, row, drawn[row], numbers[row], scratch_of(rows.size), values + row, columns + row);
  });
  return {tokens, best};
}

std::tuple<Tensor, Tensor> measure_tokens(Tensor scores, Tensor tokens) {
  const Scores rows = scores_of(scores);
  const int64_t count = scores.size(0);
  const int64_t* columns = data_of<int64_t>(tokens, ScalarType::Long, count, "tokens");
  for (int64_t row = 0; row < count; row++) {
    STD_TORCH_CHECK(columns[row] >= 0 && columns[row] < rows.size, "sampling: `tokens` are columns of the scores");
  }
  Tensor log_sums = torch::stable::new_empty(scores, {count}, ScalarType::Float);
  Tensor num_larger = torch::stable::new_empty(scores, {count}, ScalarType::Long);
  float* sums = mutable_data<float>(log_sums);
  int64_t* larger = mutable_data<int64_t>(num_larger);
  const SamplingKernels& kernels = sampling_kernels();
  Team::loop(count, [&](int64_t row) { kernels.measure(rows, row, columns[row], sums + row, larger + row); });
  return {log_sums, num_larger};
}

std::tuple<Tensor, Tensor> largest_tokens(Tensor scores, int64_t k) {
  const Scores rows = scores_of(scores);
  const int64_t count = scores.size(0);
  STD_TORCH_CHECK(k >= 1 && k <= rows.size, "sampling: `k` must be from 1 to the number of scores in a row");
  Tensor best = torch::stable::new_empty(scores, {count, k}, ScalarType::Float);
  Tensor tokens = torch::stable::new_empty(scores, {count, k}, ScalarType::Long);
  float* values = mutable_data<float>(best);
  int64_t* columns = mutable_data<int64_t>(tokens);
  const SamplingKernels& kernels = sampling_kernels();
  Team::loop(count, [&](int64_t row) {
    kernels.largest(rows, row, k, scratch_of(rows.size), values + row * k, columns + row * k);
  });
  return {best, tokens};
}

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and of its first
// two words a number strictly between 0 and 1 with 52 random bits and a half.
double philox_uniform(uint64_t seed, uint64_t branch, uint64_t position) {
  uint32_t counter[4] = {(uint32_t)position, (uint32_t)branch, 0, 0};
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = 0xD2511F53ull * counter[0], second = 0xCD9E8D57ull * counter[2];
    counter[0] = (uint32_t)(second >> 32) ^ counter[1] ^ key[0];
    counter[2] = (uint32_t)(first >> 32) ^ counter[3] ^ key[1];
    counter[1] = (uint32_t)second;
    counter[3] = (uint32_t)first;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return ((double)(counter[0] >> 6) * 0x1p26 + (double)(counter[1] >> 6) + 0.5) * 0x1p-52;
}

Tensor philox_uniforms(Tensor keys) {
  const int64_t count = keys.size(0);
  const auto* words = data_of<uint64_t>(keys, ScalarType::Long, 3 * count, "keys");
  Tensor uniform = torch::stable::new_empty(keys, {count}, ScalarType::Double);
  double* numbers = mutable_data<double>(uniform);
  for (int64_t i = 0; i < count; i++) {
    numbers[i] = philox_uniform(words[3 * i], words[3 * i + 1], words[3 * i + 2]);
  }
  return uniform;
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("argmax_tokens(Tensor scores) -> (Tensor, Tensor)");
  m.def("draw_tokens(Tensor scores, Tensor settings, Tensor uniform) -> (Tensor, Tensor)");
  m.def("measure_tokens(Tensor scores, Tensor tokens) -> (Tensor, Tensor)");
  m.def("largest_tokens(Tensor scores, int k) -> (Tensor, Tensor)");
  m.def("philox_uniforms(Tensor keys) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) {
  m.impl("argmax_tokens", TORCH_BOX(&hf_paged::argmax_tokens));
  m.impl("draw_tokens", TORCH_BOX(&hf_paged::draw_tokens));
  m.impl("measure_tokens", TORCH_BOX(&hf_paged::measure_tokens));
  m.impl("largest_tokens", TORCH_BOX(&hf_paged::largest_tokens));
  m.impl("philox_uniforms", TORCH_BOX(&hf_paged::philox_uniforms));
}
