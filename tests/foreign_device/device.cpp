// A device for tests: tensors of it lie in ordinary memory, and every operator runs on the CPU.
//
//     operator on foreign tensors    -> fallback: all on one device? -> at::native::cpu_fallback
//     memory, views, copies, numbers -> the few functions below
//
// Whoever mixes foreign tensors with the host's is told so, as with a GPU; copies between the two, and reads that a GPU
// would have to be waited for, are counted.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

#include <cstring>
#include <set>
#include <string>

namespace {

using at::IntArrayRef;
using at::Tensor;

const c10::Device kForeign(c10::DeviceType::PrivateUse1, 0);

struct Counts {
  int64_t to_device = 0, to_host = 0, waits = 0;
} counts;

// ---------------------------------------------------------------- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? c10::alloc_cpu(size) : nullptr;
    return {memory, memory, &free_memory, kForeign};
  }
  static void free_memory(void* memory) {
    if (memory) c10::free_cpu(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// There is one device with one stream, and nothing to switch.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kForeign); }
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kForeign; }
  c10::Device getDevice() const override { return kForeign; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
Hooks hooks;

// ---------------------------------------------------------------- tensors

using Dtype = std::optional<at::ScalarType>;
using AnyLayout = std::optional<at::Layout>;
using AnyDevice = std::optional<at::Device>;

Tensor new_tensor(IntArrayRef size, Dtype dtype, AnyLayout, AnyDevice, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor new_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, AnyLayout, AnyDevice, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

Tensor& set_memory(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const int64_t size = static_cast<int64_t>(storage.nbytes()) / self.itemsize(), stride = 1;
  return set_memory(self, std::move(storage), 0, {size}, {stride});
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_memory(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

const Tensor& resize_in_place(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  const int64_t end = self.storage_offset() + c10::multiply_integers(size);
  if (end * self.itemsize() > static_cast<int64_t>(self.storage().nbytes())) {
    impl->set_storage_keep_dtype(at::empty(size, self.options()).storage());
    impl->set_storage_offset(0);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

// ---------------------------------------------------------------- between device and host

bool is_foreign(const Tensor& tensor) { return tensor.device().type() == c10::DeviceType::PrivateUse1; }

// A tensor of the host on the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!is_foreign(tensor)) return tensor.detach();
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  counts.to_device += !is_foreign(source) && is_foreign(target);
  counts.to_host += is_foreign(source) && !is_foreign(target);
  on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (!target.numel()) resize_in_place(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar number_of(const Tensor& self) {
  ++counts.waits;
  return on_host(self).item();
}

// ---------------------------------------------------------------- operators

void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool any_foreign = false, any_host = false;
  const auto look = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) return;
    (is_foreign(tensor) ? any_foreign : any_host) = true;
  };
  for (const c10::IValue& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) look(tensor);
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) look(*tensor);
      }
    }
  }
  TORCH_CHECK(!(any_foreign && any_host), op.operator_name(), " is given tensors of two devices");
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const std::set<std::string> waiting{"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"};
  check_one_device(op, *stack);
  counts.waits += waiting.count(op.operator_name().name);
  const Counts before = counts;  // the fallback copies, a device would not
  at::native::cpu_fallback(op, stack);
  counts = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", new_tensor);
  m.impl("empty_strided", new_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_memory);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize_in_place);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number_of);
}

}  // namespace

PYBIND11_MODULE(foreign_device, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("counts", [] { return std::make_tuple(counts.to_device, counts.to_host, counts.waits); },
        "Copies to the device, copies to the host, and reads that would have to wait, since the process began.");
}
