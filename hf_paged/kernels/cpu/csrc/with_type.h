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

// The same for the codes of quantized keys and values.
template <class F>
INLINE void with_code_type(DType dtype, F f) {
  if (dtype == DType::e4m3) return f(e4m3{});
  if (dtype == DType::e5m2) return f(e5m2{});
  f(q8{});
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
