// The kernels of one instruction set, by float32 multiply-add, as a table: one for caches of numbers, one for codes.
#pragma once
#include "attention_few_rows.h"
#include "attention_many_rows.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

struct OfNumbers {
  template <class F>
  INLINE void with(DType dtype, F f) { with_type(dtype, f); }
};

struct OfCodes {
  template <class F>
  INLINE void with(DType dtype, F f) { with_code_type(dtype, f); }
};

template <class Of>
void few_rows_by_dtype(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  Of::with(args.cache_dtype, [&](auto number) { few_rows<FloatMath<decltype(number)>>(args, item, scratch); });
}

template <class Of>
void many_rows_by_dtype(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  Of::with(args.cache_dtype, [&](auto number) { many_rows<FloatMath<decltype(number)>>(args, item, scratch); });
}

int64_t scratch_size(const AttentionArgs& args) {
  const int64_t few = FewRowsScratch(args, nullptr).size();
  const int64_t many = ManyRowsScratch::of<FloatMath<float>>(args, nullptr).size(nullptr);
  return few > many ? few : many;
}

template <class Of>
constexpr AttentionKernels table = {few_rows_by_dtype<Of>, many_rows_by_dtype<Of>, merge, scratch_size};

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
