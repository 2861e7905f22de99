// torch.ops.hf_paged.linear
#include "linear_tensors.h"

namespace hf_paged {

Tensor linear_op(Tensor x, std::vector<Tensor> weights, std::vector<std::optional<Tensor>> biases, int64_t activation,
                 bool gated, std::optional<Tensor> residual) {
  STD_TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "linear: x must be [tokens, k] with contiguous rows");
  STD_TORCH_CHECK(!weights.empty() && weights.size() <= 3 && weights.size() == biases.size(),
                  "linear: 1 to 3 weights, each with a bias or None");
  STD_TORCH_CHECK(!gated || weights.size() == 2, "linear: a gated product has two weights");
  STD_TORCH_CHECK(activation >= 0 && activation < num_activations, "linear: no activation has this number");
  LinearArgs a;
  a.x = x.const_data_ptr();
  a.x_stride = x.stride(0);
  a.x_dtype = a.y_dtype = dtype_of(x);
  a.num_tokens = x.size(0);
  a.k = x.size(1);
  a.num_parts = (int)weights.size();
  a.gated = gated;
  a.activation = (Activation)activation;
  int64_t num_columns = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    a.parts[i] = linear_part(weights[i], biases[i].has_value() ? &*biases[i] : nullptr, a.k);
    num_columns += a.parts[i].num_rows;
  }
  if (a.num_parts == 2) agree_on_activations({&a.parts[0], &a.parts[1]});
  if (a.num_parts == 3) agree_on_activations({&a.parts[0], &a.parts[1], &a.parts[2]});
  if (gated) {
    STD_TORCH_CHECK(a.parts[0].num_rows == a.parts[1].num_rows, "linear: gate and up must have equal rows");
    num_columns = a.parts[0].num_rows;
  }
  Tensor y = torch::stable::new_empty(x, {a.num_tokens, num_columns});
  a.y = y.mutable_data_ptr();
  a.y_stride = num_columns;
  if (residual.has_value()) {
    STD_TORCH_CHECK(residual->dim() == 2 && residual->size(0) == a.num_tokens && residual->size(1) == num_columns &&
                        residual->stride(1) == 1,
                    "linear: a residual has the shape of the result and contiguous rows");
    a.residual = residual->const_data_ptr();
    a.residual_stride = residual->stride(0);
    a.residual_dtype = dtype_of(*residual);
  }
  linear(a);
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def(
      "linear(Tensor x, Tensor[] weights, Tensor?[] biases, int activation, bool gated, Tensor? residual) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) { m.impl("linear", TORCH_BOX(&linear_op)); }

}  // namespace hf_paged
