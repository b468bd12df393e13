// A CUDA device whose memory is the host's. Every operator and collective of CUDA tensors runs on
// the CPU, on aliases of them; autograd runs their backward in a thread of its own, as on a GPU.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// ---- one device, one stream, events that have always happened ----------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- memory ------------------------------------------------------------------------------------

// What the data pointer of a CUDA storage holds: the CPU storage that owns the memory.
struct Owner {
  c10::Storage cpu;
};

void release(void* owner) { delete static_cast<Owner*>(owner); }

c10::DataPtr pointer_to(const c10::Storage& cpu) {
  return c10::DataPtr(const_cast<void*>(cpu.data()), new Owner{cpu}, &release, kDevice);
}

c10::Storage on_device(const c10::Storage& cpu) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), cpu.nbytes(), pointer_to(cpu), nullptr, false));
}

const c10::Storage& on_host(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  TORCH_CHECK(data.get_deleter() == &release, "CUDA memory that the simulated device did not make");
  return static_cast<Owner*>(data.get_context())->cpu;
}

void copy_layout(const Tensor& from, const Tensor& to) {
  to.unsafeGetTensorImpl()->set_storage_offset(from.storage_offset());
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides());
}

Tensor alias(const Tensor& x, const c10::Storage& storage, c10::DispatchKey key) {
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), x.dtype());
  copy_layout(x, out);
  if (x.is_conj()) out._set_conj(true);
  if (x.is_neg()) out._set_neg(true);
  return out;
}

Tensor on_host(const Tensor& x) {
  return alias(x, on_host(x.storage()), c10::DispatchKey::CPU);
}

}  // namespace

// torch asks the registry once, so this library has to be loaded before torch is imported.
namespace at {
struct SimulatedHooks : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at

// ---- operators ---------------------------------------------------------------------------------

namespace {

// What takes tensors of two devices: copies, and indices on the host.
bool mixes(const std::string& name) {
  return name == "aten::copy_" || name.rfind("aten::index", 0) == 0 ||
      name.rfind("aten::_index_put_impl", 0) == 0;
}

// The value with `turn` applied to its tensors, those of a list, or a list of lists, included.
IValue with_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& turn) {
  if (value.isTensor()) return turn(value.toTensor());
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList())
    return value;
  c10::impl::GenericList list(value.toList().elementType());
  for (const IValue& element : value.toListRef()) list.push_back(with_tensors(element, turn));
  return list;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  std::vector<std::pair<Tensor, Tensor>> aliases;  // (CUDA, the same memory on the host)
  bool has_host = false, makes_cuda = false;

  const auto lowered = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || !x.is_cuda()) {
      has_host |= x.defined() && x.dim() > 0;
      return x;
    }
    for (const auto& [cuda, host] : aliases)
      if (cuda.is_same(x)) return host;
    return aliases.emplace_back(x, on_host(x)).second;
  };
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_cuda = true;
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isStorage() && value.toStorage().device().is_cuda()) {
      value = c10::Storage(on_host(value.toStorage()));
    }
    value = with_tensors(value, lowered);
  }
  makes_cuda |= !aliases.empty();
  TORCH_CHECK(
      aliases.empty() || !has_host || mixes(name),
      name, ": expected all tensors on one device, got some on cuda:0 and some on the CPU");

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (const auto& [cuda, host] : aliases) {  // `resize_`, an `out=` of another shape
    auto* storage = cuda.storage().unsafeGetStorageImpl();
    if (host.storage().data() != storage->data()) {
      storage->set_data_ptr_noswap(pointer_to(host.storage()));
      storage->set_nbytes(host.storage().nbytes());
    }
    copy_layout(host, cuda);
  }
  const auto raised = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || !x.is_cpu()) return x;
    for (const auto& [cuda, host] : aliases)
      if (host.is_same(x)) return cuda;
    if (name == "aten::copy_" || !makes_cuda) return x;
    for (const auto& [cuda, host] : aliases)  // a view shares its base's storage
      if (host.storage().is_alias_of(x.storage()))
        return alias(x, cuda.storage(), c10::DispatchKey::CUDA);
    return alias(x, on_device(x.storage()), c10::DispatchKey::CUDA);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = with_tensors((*stack)[i], raised);
}

// Products that only CUDA has: of 16-bit operands, with float32 results.

Tensor& mm_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  TORCH_CHECK(at::isReducedFloatingType(a.scalar_type()) && a.dtype() == b.dtype());
  TORCH_CHECK(dtype == at::kFloat && out.scalar_type() == at::kFloat);
  on_host(out).copy_(at::mm(on_host(a).to(dtype), on_host(b).to(dtype)));
  return out;
}

Tensor& addmm_out(
    const Tensor& x, const Tensor& a, const Tensor& b, at::ScalarType dtype,
    const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(at::isReducedFloatingType(a.scalar_type()) && a.dtype() == b.dtype());
  TORCH_CHECK(dtype == at::kFloat && out.scalar_type() == at::kFloat && x.dtype() == out.dtype());
  on_host(out).copy_(
      at::addmm(on_host(x), on_host(a).to(dtype), on_host(b).to(dtype), beta, alpha));
  return out;
}

Tensor mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  return mm_out(a, b, dtype, out);
}

Tensor addmm(
    const Tensor& x, const Tensor& a, const Tensor& b, at::ScalarType dtype,
    const at::Scalar& beta, const at::Scalar& alpha) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  return addmm_out(x, a, b, dtype, beta, alpha, out);
}

}  // namespace

// That torch's own kernels for CUDA tensors are replaced is meant: no warning while this is loaded.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
Silence silence;
c10::WarningHandler* const handler_before = [] {
  auto* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&silence);
  return before;
}();

#define ON_HOST(name) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>())

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  ON_HOST("copy_");
  ON_HOST("is_pinned");
  m.impl("mm.dtype", &mm);
  m.impl("mm.dtype_out", &mm_out);
  m.impl("addmm.dtype", &addmm);
  m.impl("addmm.dtype_out", &addmm_out);
}

// A process group sends them by the backend that it has for the host's tensors: gloo.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"allreduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_",
        "allreduce_coalesced_", "broadcast_", "reduce_", "send", "recv_", "barrier"})
    ON_HOST(name);
}

const bool restored = (c10::WarningUtils::set_warning_handler(handler_before), true);
