// The kernels of one instruction set, by float32 multiply-add, as a table.
#pragma once
#include "attention_few_rows.h"
#include "attention_many_rows.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {
namespace {

void few_rows_by_dtype(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  with_cache_type(args.cache_dtype, [&](auto number) { few_rows<FloatMath<decltype(number)>>(args, item, scratch); });
}

void many_rows_by_dtype(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  with_cache_type(args.cache_dtype, [&](auto number) { many_rows<FloatMath<decltype(number)>>(args, item, scratch); });
}

int64_t scratch_size(const AttentionArgs& args) {
  const int64_t few = FewRowsScratch(args, nullptr).size();
  const int64_t many = ManyRowsScratch::of<FloatMath<float>>(args, nullptr).size(nullptr);
  return few > many ? few : many;
}

}  // namespace
}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
