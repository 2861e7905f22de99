// What every operator file shares: torch's stable ABI, dtypes, checks and the thread pool.
//
// Operator files (op_*.cpp) see torch and know nothing of instruction sets; kernel files (*_avx2.cpp, ...) are compiled
// for one instruction set and know nothing of torch.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <optional>
#include <vector>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Float: return DType::f32;
    case torch::headeronly::ScalarType::BFloat16: return DType::bf16;
    case torch::headeronly::ScalarType::Half: return DType::f16;
    default: STD_TORCH_CHECK(false, "hf_paged: only float32, bfloat16 and float16 are implemented"); return DType::f32;
  }
}

// Runs work(item) for each of `count` items on torch's threads, the next free thread taking the next item.
template <class Work>
inline void parallel_items(int64_t count, const Work& work) {
  const int64_t threads = torch::stable::get_num_threads();
  if (count <= 1 || threads <= 1) {
    for (int64_t item = 0; item < count; item++) work(item);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(item);
  });
}

}  // namespace hf_paged
