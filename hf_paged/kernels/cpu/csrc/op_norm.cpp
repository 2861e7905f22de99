// Operators: rms_norm and layer_norm, with and without a residual.
#include "norm.h"

#include <tuple>

#include "op.h"

namespace hf_paged {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Norm = void (*)(const NormArgs&, int64_t, int64_t);

constexpr int64_t numbers_per_item = 16384;  // work that is worth another thread

void check_vector(const OptionalTensor& vector, const OptionalTensor& like, int64_t size, const char* name) {
  if (!vector) return;
  STD_TORCH_CHECK(vector->dim() == 1 && vector->size(0) == size && vector->is_contiguous(), "hf_paged norm: ", name,
                  " must be contiguous and have as many numbers as a row of x (", size, ")");
  STD_TORCH_CHECK(!like || like->scalar_type() == vector->scalar_type(),
                  "hf_paged norm: weight and bias must have the same dtype");
}

void check_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 || x.dim() == 3,
                  "hf_paged norm: x must be [rows, size] or [outer, inner, size], not of ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(-1) <= 1 || x.stride(-1) == 1, "hf_paged norm: the rows of x must be contiguous");
}

// Everything but the residual; y is contiguous.
NormArgs arguments(const Tensor& x, const Tensor& y, const OptionalTensor& weight, const OptionalTensor& bias,
                   double eps, double offset) {
  check_rows(x);
  const bool two_levels = x.dim() == 3;
  NormArgs args;
  args.size = x.size(-1);
  check_vector(weight, {}, args.size, "weight");
  check_vector(bias, weight, args.size, "bias");
  args.inner = two_levels ? x.size(1) : 1;
  args.x = x.const_data_ptr();
  args.x_outer_stride = x.stride(0);
  args.x_stride = two_levels ? x.stride(1) : 0;
  args.x_dtype = dtype_of(x);
  args.y = y.mutable_data_ptr();
  args.y_outer_stride = args.inner * args.size;
  args.y_stride = args.size;
  args.y_dtype = dtype_of(y);
  args.weight = weight ? weight->const_data_ptr() : nullptr;
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.weight_dtype = weight ? dtype_of(*weight) : bias ? dtype_of(*bias) : DType::f32;
  args.weight_offset = (float)offset;
  args.eps = (float)eps;
  return args;
}

void run(const NormArgs& args, int64_t rows, Norm norm) {
  if (rows == 0 || args.size == 0) return;
  const int64_t per_item = args.size >= numbers_per_item ? 1 : numbers_per_item / args.size;
  Team::loop((rows + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t begin = item * per_item, end = begin + per_item;
    norm(args, begin, end < rows ? end : rows);
  });
}

Tensor plain(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, double offset,
             Norm norm) {
  check_rows(x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  const NormArgs args = arguments(x, y, weight, bias, eps, offset);
  run(args, x.size(0) * args.inner, norm);
  return y;
}

std::tuple<Tensor, Tensor> with_residual(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                         const OptionalTensor& bias, double eps, double offset, Norm norm) {
  check_rows(residual);
  STD_TORCH_CHECK(x.dim() == 2 && residual.dim() == 2, "hf_paged norm: with a residual, x must be [rows, size]");
  STD_TORCH_CHECK(x.size(0) == residual.size(0) && x.size(1) == residual.size(1),
                  "hf_paged norm: residual must have the shape of x");
  Tensor y = torch::stable::new_empty(x, x.sizes()), sum = torch::stable::new_empty(residual, residual.sizes());
  NormArgs args = arguments(x, y, weight, bias, eps, offset);
  args.residual = residual.const_data_ptr();
  args.residual_stride = residual.stride(0);
  args.residual_dtype = dtype_of(residual);
  args.sum = sum.mutable_data_ptr();
  args.sum_stride = args.size;
  run(args, x.size(0), norm);
  return {y, sum};
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset) {
  return plain(x, weight, {}, eps, offset, norm_kernels().rms);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, double offset) {
  return with_residual(x, residual, weight, {}, eps, offset, norm_kernels().rms);
}

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  double offset) {
  return plain(x, weight, bias, eps, offset, norm_kernels().layer_norm);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps, double offset) {
  return with_residual(x, residual, weight, bias, eps, offset, norm_kernels().layer_norm);
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> Tensor");
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset) "
        "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&hf_paged::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&hf_paged::add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&hf_paged::layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&hf_paged::add_layer_norm));
}
