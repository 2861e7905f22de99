// Operators: activation and gated_activation.
#include "activation.h"

#include "op.h"

namespace hf_paged {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t numbers_per_item = 8192;  // work that is worth another thread

void check_rows(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1), "hf_paged activation: ", name,
                  " must be [rows, size] with contiguous rows");
}

Tensor apply(const Tensor& gate, const OptionalTensor& up, int64_t activation) {
  check_rows(gate, "gate");
  STD_TORCH_CHECK(activation >= 0 && activation < num_activations, "hf_paged activation: no activation has the number ",
                  activation);
  Tensor y = torch::stable::new_empty(gate, gate.sizes());
  ActivationArgs args;
  args.gate = gate.const_data_ptr();
  args.gate_stride = gate.stride(0);
  if (up) {
    check_rows(*up, "up");
    STD_TORCH_CHECK(up->size(0) == gate.size(0) && up->size(1) == gate.size(1) &&
                        up->scalar_type() == gate.scalar_type(),
                    "hf_paged activation: gate and up must have the same shape and dtype");
    args.up = up->const_data_ptr();
    args.up_stride = up->stride(0);
  }
  args.size = args.y_stride = gate.size(1);
  args.y = y.mutable_data_ptr();
  args.dtype = dtype_of(gate);
  args.activation = (Activation)activation;
  const int64_t rows = gate.size(0);
  if (rows == 0 || args.size == 0) return y;
  const int64_t per_item = args.size >= numbers_per_item ? 1 : numbers_per_item / args.size;
  const auto kernel = activation_kernels().apply;
  Team::loop((rows + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t begin = item * per_item, end = begin + per_item;
    kernel(args, begin, end < rows ? end : rows);
  });
  return y;
}

Tensor activation(const Tensor& x, int64_t activation) { return apply(x, {}, activation); }

Tensor gated_activation(const Tensor& gate, const Tensor& up, int64_t activation) {
  return apply(gate, up, activation);
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("activation(Tensor x, int activation) -> Tensor");
  m.def("gated_activation(Tensor gate, Tensor up, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) {
  m.impl("activation", TORCH_BOX(&hf_paged::activation));
  m.impl("gated_activation", TORCH_BOX(&hf_paged::gated_activation));
}
