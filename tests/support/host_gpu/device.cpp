// A "cuda" device whose memory is the host's and whose operations are the CPU's.
//
// Every operation on its tensors runs the CPU's kernel on the same memory.  As on a GPU, a tensor
// of the host among them is an error (but for copies and indices), autograd runs backward passes
// in a thread of the device, and collectives take its tensors; as on no GPU, all is done at once.

// Torch's headers then declare the operations that they name, and not all of them.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kGpu(DeviceType::CUDA, 0);
std::atomic<int64_t> allocated{0}, most_allocated{0}, waits{0}, kernel_ns{0};

void count(int64_t bytes) {
  int64_t now = allocated += bytes;
  for (int64_t most = most_allocated; most < now;)
    if (most_allocated.compare_exchange_weak(most, now)) break;
}

// Adds the time of a thread's outermost kernel to kernel_ns: on a GPU the host does not spend it.
struct KernelTime {
  using Clock = std::chrono::steady_clock;
  static thread_local int depth;
  static thread_local Clock::time_point start;
  static void begin() {
    if (depth++ == 0) start = Clock::now();
  }
  static void end() {
    if (--depth == 0) kernel_ns += std::chrono::nanoseconds(Clock::now() - start).count();
  }
  KernelTime() { begin(); }
  ~KernelTime() { end(); }
};
thread_local int KernelTime::depth = 0;
thread_local KernelTime::Clock::time_point KernelTime::start;

// ---- memory

struct Block {
  c10::DataPtr data;
  int64_t bytes;
  Block(c10::DataPtr from, int64_t n) : data(std::move(from)), bytes(n) { count(n); }
  ~Block() { count(-bytes); }
};

c10::DataPtr on_gpu(c10::DataPtr data, int64_t bytes) {
  void* start = data.get();
  auto* block = new Block(std::move(data), bytes);
  return {start, block, [](void* p) { delete static_cast<Block*>(p); }, kGpu};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_gpu(c10::GetCPUAllocator()->allocate(bytes), static_cast<int64_t>(bytes));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Memory memory;

// ---- streams and events: all work is done when it is asked for

thread_local c10::StreamId stream_of_thread = 0;
std::atomic<c10::StreamId> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kGpu; }
  Device getDevice() const override { return kGpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream stream(c10::StreamId id) const { return Stream(Stream::UNSAFE, kGpu, id); }
  Stream getStream(Device) const override { return stream(stream_of_thread); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(++streams); }
  Stream getNewStream(Device, int) const override { return stream(++streams); }
  Stream exchangeStream(Stream next) const override {
    return stream(std::exchange(stream_of_thread, next.id()));
  }
  using Clock = std::chrono::steady_clock;
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { ++waits; }
  void synchronizeEvent(void*) const override { ++waits; }
  void synchronizeDevice(DeviceIndex) const override { ++waits; }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    auto at = [](void* event) { return *static_cast<Clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(at(end) - at(begin)).count();
  }
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return kGpu; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// ---- operations

struct Aliases {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // of the device, of the host
  bool saw_host_tensor = false;

  Tensor on_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      saw_host_tensor |= tensor.dim() > 0 && tensor.device().is_cpu();
      return tensor;
    }
    for (auto& [gpu, host] : pairs)
      if (gpu.is_same(tensor)) return host;
    auto owner = std::make_unique<c10::Storage>(tensor.storage());
    void* start = owner->mutable_data();
    c10::DataPtr data(start, owner.release(),
                      [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(at::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    pairs.emplace_back(tensor, alias);
    return alias;
  }

  Tensor of_storage(c10::Storage storage, const Tensor& like) {
    Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                        like.storage_offset());
    if (like.is_conj()) tensor._set_conj(true);
    if (like.is_neg()) tensor._set_neg(true);
    return tensor;
  }

  static c10::DataPtr adopt(const Tensor& host) {
    auto bytes = static_cast<int64_t>(host.storage().nbytes());
    void* start = host.storage().mutable_data();
    return on_gpu({start, new Tensor(host), [](void* p) { delete static_cast<Tensor*>(p); },
                   Device(at::kCPU)}, bytes);
  }

  Tensor back(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (auto& [gpu, alias] : pairs)
      if (alias.is_same(host)) return gpu;
    for (auto& [gpu, alias] : pairs)
      if (alias.storage().is_alias_of(host.storage())) return of_storage(gpu.storage(), host);
    c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), adopt(host),
                         &memory, /*resizable=*/true);
    return of_storage(std::move(storage), host);
  }

  // What an `out=` has become: another shape, other memory.
  void follow_resizes() {
    for (auto& [gpu, host] : pairs) {
      if (gpu.storage().data() != host.storage().data()) {
        gpu.storage().set_data_ptr_noswap(adopt(host));
        gpu.storage().set_nbytes(host.storage().nbytes());
      }
      if (gpu.sizes() != host.sizes() || gpu.strides() != host.strides())
        gpu.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                         host.storage_offset());
    }
  }

  template <class Convert>
  c10::IValue each(const c10::IValue& value, Convert convert) {
    if (value.isTensor()) return convert(value.toTensor());
    if (!value.isList()) return value;
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, each(list.get(i), convert));
    return list;
  }
};

bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::copy_", "aten::_copy_from", "aten::index.Tensor", "aten::index_put_",
      "aten::_index_put_impl_", "aten::set_.source_Tensor", "aten::_foreach_copy_"};
  return names.count(name) || name.rfind("aten::index.Tensor_out", 0) == 0;
}

// Kernels of a GPU that sum in no fixed order, and have no other kernel, refuse to run under
// torch.use_deterministic_algorithms(True); GEMMs refuse unless cuBLAS has its own workspaces.
// From torch's documentation of that function and the calls of alertNotDeterministic in ATen/cuda.
void check_deterministic(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  static const std::set<std::string> never = {
      "aten::kthvalue", "aten::median.dim", "aten::nanmedian.dim", "aten::histc",
      "aten::_ctc_loss_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward",
      "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool2d_backward",
      "aten::_adaptive_avg_pool3d_backward", "aten::max_pool3d_with_indices_backward",
      "aten::adaptive_max_pool2d_backward", "aten::upsample_linear1d_backward",
      "aten::upsample_bilinear2d_backward", "aten::upsample_bicubic2d_backward",
      "aten::upsample_trilinear3d_backward", "aten::reflection_pad1d_backward",
      "aten::reflection_pad2d_backward", "aten::replication_pad1d_backward",
      "aten::replication_pad2d_backward", "aten::grid_sampler_2d_backward",
      "aten::grid_sampler_3d_backward", "aten::_embedding_bag_dense_backward"};
  static const std::set<std::string> gemms = {"aten::mm", "aten::addmm", "aten::addmm_",
      "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::mv", "aten::addmv", "aten::dot"};
  if (!at::globalContext().deterministicAlgorithms()) return;
  const std::string base = name.substr(0, name.find('.'));
  bool refuses = never.count(name);
  if (base == "aten::cumsum" || base == "aten::cumsum_")
    refuses = stack[first].toTensor().is_floating_point();
  if (base == "aten::put_") refuses = !stack[first + 3].toBool();
  if (base == "aten::bincount") refuses = stack[first + 1].isTensor();
  if (refuses) at::globalContext().alertNotDeterministic(name);
  if (!gemms.count(base)) return;
  const char* set = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string workspace = set ? set : "";
  TORCH_CHECK(workspace == ":4096:8" || workspace == ":16:8", "Deterministic behavior was enabled "
              "but cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8: ", name);
}

// cuBLAS multiplies fp8 rows [m, k] by columns [k, n], with k and n in multiples of 16, from and to
// addresses in multiples of 16 bytes; it has no product of e5m2 and e5m2.
void check_scaled_mm(const torch::jit::Stack& stack, size_t first, const std::string& name) {
  const Tensor a = stack[first].toTensor(), b = stack[first + 1].toTensor();
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
              "Multiplication of two Float8_e5m2 matrices is not supported");
  for (const Tensor& t : {a, b})
    TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, "unaligned fp8 GEMM");
  for (size_t i = first + 2; i < first + 4 && name.rfind("aten::_scaled_mm_v2", 0) != 0; ++i) {
    const Tensor scale = stack[i].toTensor();
    TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.numel() == 1 && scale.is_cuda(),
                "fp8 GEMM with a scale of ", scale.scalar_type(), " ", scale.sizes());
  }
  if (name == "aten::_scaled_mm.out") {
    const Tensor out = stack.back().toTensor();
    TORCH_CHECK(out.is_contiguous() && reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0,
                "unaligned output of an fp8 GEMM");
  }
  TORCH_CHECK(a.stride(1) == 1 && b.stride(0) == 1, "mat1 must be row-major, mat2 column-major");
  TORCH_CHECK(a.size(1) % 16 == 0 && b.size(1) % 16 == 0,
              "fp8 GEMMs need k and n in multiples of 16, got ", a.sizes(), " and ", b.sizes());
}

// CUTLASS reads bf16 from addresses and with strides in multiples of 16 bytes.  Other dtypes take a
// loop of GEMMs, for which torch copies the ends of the groups to the host.
void check_grouped_mm(const torch::jit::Stack& stack, size_t first) {
  for (size_t i = first; i < first + 2; ++i) {
    const Tensor t = stack[i].toTensor();
    const int64_t unit = 16 / t.element_size(), last = t.dim() - 1;
    TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, "unaligned grouped GEMM");
    TORCH_CHECK(t.stride(last) == 1 || t.stride(last - 1) == 1, "grouped GEMM of ", t.strides());
    for (int64_t stride : t.strides())
      TORCH_CHECK(stride == 1 || stride % unit == 0, "grouped GEMM of strides ", t.strides());
  }
  TORCH_CHECK(stack[first + 2].toTensor().scalar_type() == at::kInt, "ends are int32");
  if (stack[first].toTensor().scalar_type() != at::kBFloat16) ++waits;
}

// The number of rows that a grouped GEMM of rows [m, k] computes; those after them stay unwritten.
int64_t computed_rows(const torch::jit::Stack& stack, size_t first) {
  if (stack[first].toTensor().dim() != 2 || stack[first + 1].toTensor().dim() != 3) return -1;
  const Tensor ends = stack[first + 2].toTensor();
  return static_cast<const int32_t*>(ends.data_ptr())[ends.numel() - 1];
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  KernelTime time;
  const auto& schema = op.schema();
  const size_t given = schema.arguments().size(), first = stack->size() - given;
  const std::string name = c10::toString(op.operator_name());
  check_deterministic(name, *stack, first);
  if (name.rfind("aten::_scaled_mm", 0) == 0) check_scaled_mm(*stack, first, name);
  const bool is_grouped = name.rfind("aten::_grouped_mm", 0) == 0;
  if (is_grouped) check_grouped_mm(*stack, first);
  const int64_t computed = is_grouped ? computed_rows(*stack, first) : -1;
  Aliases aliases;
  bool on_host_is_asked = false;  // a factory on the CPU for tensors of the device
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice()) {
      if (value.toDevice().is_cuda()) value = Device(at::kCPU);
      else on_host_is_asked = true;
      continue;
    }
    value = aliases.each(value, [&](const Tensor& t) { return aliases.on_host(t); });
  }
  TORCH_CHECK(!aliases.saw_host_tensor || takes_host_tensors(name),
              "Expected all tensors to be on the same device, but found cuda and cpu: ", name);
  if (name == "aten::_local_scalar_dense" || name == "aten::nonzero" || name == "aten::equal")
    ++waits;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (computed >= 0) stack->back().toTensor().slice(0, computed).fill_(std::nan(""));
  aliases.follow_resizes();
  if (on_host_is_asked) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = aliases.each((*stack)[i], [&](const Tensor& t) { return aliases.back(t); });
}

void copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& to = (*stack)[stack->size() - 3].toTensor();
  const auto& from = (*stack)[stack->size() - 2].toTensor();
  const bool non_blocking = (*stack)[stack->size() - 1].toBool();
  if (to.is_cuda() != from.is_cuda() && !non_blocking) ++waits;
  run_on_host(op, stack);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {1});
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

// A GPU takes 16 bits and gives 32; the CPU's kernel does not.
template <Tensor (*softmax)(const Tensor&, int64_t, bool)>
Tensor wide_softmax(const Tensor& given, int64_t dim, bool half_to_float) {
  Aliases aliases;
  Tensor host = aliases.on_host(given);
  return aliases.back(softmax(half_to_float ? host.to(at::kFloat) : host, dim, false));
}

// cuBLAS adds the product of 16-bit matrices to an fp32 matrix.
Tensor& addmm_in_fp32(const Tensor& total, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                      const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  KernelTime time;
  TORCH_CHECK(a.dtype() == b.dtype(), "cuBLAS multiplies matrices of one dtype");
  TORCH_CHECK(at::isReducedFloatingType(a.scalar_type()), "out_dtype is for 16-bit matrices");
  for (at::ScalarType given : {dtype, total.scalar_type(), out.scalar_type()})
    TORCH_CHECK(given == at::kFloat, "16-bit matrices are added to fp32");
  for (const Tensor& t : {a, b})
    TORCH_CHECK(t.stride(0) == 1 || t.stride(1) == 1, "cuBLAS reads adjacent values");
  Aliases aliases;
  const Tensor left = aliases.on_host(a).to(at::kFloat).mul(alpha);
  Tensor product = left.mm(aliases.on_host(b).to(at::kFloat));
  if (beta.toDouble() != 0) product = product.add(aliases.on_host(total).mul(beta));
  aliases.on_host(out).copy_(product);
  return out;
}

void record_stream(Tensor&, Stream) {}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

// Attention that asks for no kernel is the formula; a build with CUDA would ask the driver.
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return 0;
}

// Replaces the kernels that torch has for a GPU: those of collectives, and in a build with CUDA those
// of all operations.  Torch warns of each.
bool take_kernels() {
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const auto key = c10::DispatchKey::CUDA;
  static torch::Library aten(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  static torch::Library c10d(torch::Library::IMPL, "c10d", key, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    const auto space = name.getNamespace().value_or("");
    if (space != "aten" && space != "c10d") continue;
    auto& library = space == "aten" ? aten : c10d;
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
  return true;
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks);
}
static const bool has_memory = (c10::SetAllocator(DeviceType::CUDA, &memory, 255), true);

// Before the kernels that follow.
static const bool has_kernels = take_kernels();

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("_softmax", TORCH_FN((wide_softmax<at::_softmax>)));
  m.impl("_log_softmax", TORCH_FN((wide_softmax<at::_log_softmax>)));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_in_fp32));
  m.impl("record_stream", TORCH_FN(record_stream));
  // Otherwise a loop of GEMMs runs, as for a device without a kernel.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
}

TORCH_LIBRARY(host_gpu, m) {
  m.def("resize_storage(Tensor tensor, int bytes) -> ()");
}
TORCH_LIBRARY_IMPL(host_gpu, CUDA, m) {
  m.impl("resize_storage", TORCH_FN(resize_storage));
}

PYBIND11_MODULE(host_gpu_cpp, m) {
  m.def("allocated", [] { return allocated.load(); });
  m.def("most_allocated", [] { return most_allocated.load(); });
  m.def("reset_peak_memory", [] { most_allocated = allocated.load(); });
  m.def("kernel_ns", [] { return kernel_ns.load(); }, "Nanoseconds inside of kernels.");
  m.def("begin_kernel", &KernelTime::begin, "Begin a kernel that Python computes.");
  m.def("end_kernel", &KernelTime::end);
  m.def("waits", [] { return waits.load(); }, "How often the host has waited for the device.");
}
