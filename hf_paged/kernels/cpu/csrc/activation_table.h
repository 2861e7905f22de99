// From an activation's number to its kernel; include it after vec_*.h.
#pragma once
#include "activation_kernels.h"

namespace hf_paged {
namespace KERNEL_NAMESPACE {

static void apply(const ActivationArgs& args, int64_t begin, int64_t end) {
  with_activation(args.activation, [&](auto choice) { activate_rows<decltype(choice)::value>(args, begin, end); });
}

}  // namespace KERNEL_NAMESPACE
}  // namespace hf_paged
