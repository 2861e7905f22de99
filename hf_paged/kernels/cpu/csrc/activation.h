// Activation functions and gated activations over rows: arguments and the table of kernels.
#pragma once
#include <stdint.h>

#include "dtype.h"
#include "isa.h"

namespace hf_paged {

// The numbers are those of hf_paged/kernels/cpu/activations.py.
enum class Activation : int32_t {
  identity = 0,
  silu = 1,
  gelu = 2,       // with the error function
  gelu_tanh = 3,  // gelu_new, gelu_fast, gelu_pytorch_tanh
  quick_gelu = 4,
  relu = 5,
  relu2 = 6,  // squared
  sigmoid = 7,
  tanh = 8,
};

constexpr int64_t num_activations = 9;

// y = activation(gate) * up, or activation(gate) where up is null. Rows are contiguous, strides are in elements.
struct ActivationArgs {
  const void* gate = nullptr;
  const void* up = nullptr;
  void* y = nullptr;  // may be gate or up
  int64_t gate_stride = 0, up_stride = 0, y_stride = 0;
  DType dtype = DType::f32;  // of the three
  Activation activation = Activation::identity;
  int64_t size = 0;  // numbers in a row
};

struct ActivationKernels {
  void (*apply)(const ActivationArgs& args, int64_t begin, int64_t end);  // rows begin ... end - 1
};

extern const ActivationKernels activation_avx2, activation_avx512;

inline const ActivationKernels& activation_kernels() {
  return current_isa() >= Isa::avx512 ? activation_avx512 : activation_avx2;
}

}  // namespace hf_paged
