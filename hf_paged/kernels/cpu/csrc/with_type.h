// From a dtype at run time to a type at compile time, for kernel headers; include it after vec_*.h.
#pragma once
namespace hf_paged {
namespace KERNEL_NAMESPACE {

// Calls f with a number of the type that `dtype` names.
template <class F>
INLINE void with_type(DType dtype, F f) {
  if (dtype == DType::bf16) return f(bf16{});
  if (dtype == DType::f16) return f(f16{});
  f(float{});
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
