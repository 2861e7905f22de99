// From an activation's number to its kernel; include it after vec_*.h.
#pragma once
#include "activation_kernels.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

static void apply(const ActivationArgs& args, int64_t begin, int64_t end) {
  switch (args.activation) {
    case Activation::identity: return activate_rows<Activation::identity>(args, begin, end);
    case Activation::silu: return activate_rows<Activation::silu>(args, begin, end);
    case Activation::gelu: return activate_rows<Activation::gelu>(args, begin, end);
    case Activation::gelu_tanh: return activate_rows<Activation::gelu_tanh>(args, begin, end);
    case Activation::quick_gelu: return activate_rows<Activation::quick_gelu>(args, begin, end);
    case Activation::relu: return activate_rows<Activation::relu>(args, begin, end);
    case Activation::relu2: return activate_rows<Activation::relu2>(args, begin, end);
    case Activation::sigmoid: return activate_rows<Activation::sigmoid>(args, begin, end);
    case Activation::tanh: return activate_rows<Activation::tanh>(args, begin, end);
  }
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
