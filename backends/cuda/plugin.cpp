// The CUDA backend: kernel rows over the operator modules, memory, streams and events.
//
// Loads without a driver: the CUDA runtime is linked statically and finds the driver when it is
// first called, which initialize() does. Streams of other libraries (torch's) are wrapped as they
// are: both runtimes use the device's primary context.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/build_id.hpp"
#include "common/device_scope.hpp"
#include "common/stream.hpp"
#include "copy/api.hpp"
#include "gemm/library.hpp"
#include "rm/graph.h"
#include "rm/kernels.h"
#include "rm/plugin.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

constexpr std::string_view kVersion = "0.1.0";
// Below the CPU's: "auto" does not choose a GPU by itself yet (docs/gpu.md).
constexpr int kScore = 50;
constexpr size_t kAlignment = 256;  // that cudaMalloc keeps at least

struct DeviceBuffer final : plugin::Buffer {
  DeviceBuffer(int device, size_t bytes, size_t align) : device(device) {
    const DeviceScope scope(device);
    const RelaxedCapture relaxed;
    const size_t more = align > kAlignment ? align - kAlignment : 0;
    check_cuda(cudaMalloc(&memory, std::max<size_t>(bytes, 1) + more), "memory on the device");
    const auto first = reinterpret_cast<uintptr_t>(memory);
    data = reinterpret_cast<void*>(more == 0 ? first : (first + align - 1) & ~(align - 1));
  }
  // cudaFree waits for the device: nothing that still reads the memory can be under way behind it.
  ~DeviceBuffer() override {
    const RelaxedCapture relaxed;
    if (cudaFree(memory) != cudaSuccess) cudaGetLastError();  // the process ends, or the context did
  }
  void* ptr() override { return data; }

  const int device;
  void* memory = nullptr;  // what the driver gave
  void* data = nullptr;    // the first aligned byte of it
};

cudaGraphExec_t exec_of(rm_graph* graph) { return reinterpret_cast<cudaGraphExec_t>(graph); }

rm_status* begin_graph(rm_stream* stream) {
  return plugin::guard([&] {
    // Relaxed: a kernel that is loaded on its first launch allocates.
    check_cuda(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeRelaxed),
               "a recording");
  });
}

rm_status* end_graph(rm_stream* stream, rm_graph** out) {
  return plugin::guard([&] {
    *out = nullptr;
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_of(stream), &graph), "a whole recording");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t e = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(e, "a graph that can run");
    *out = reinterpret_cast<rm_graph*>(exec);
  });
}

rm_status* launch_graph(rm_graph* graph, rm_stream* stream) {
  return plugin::guard([&] {
    const auto& on = *static_cast<CudaStream*>(reinterpret_cast<plugin::Stream*>(stream));
    const DeviceScope scope(on.device);
    check_cuda(cudaGraphLaunch(exec_of(graph), on.stream), "a graph's launch");
  });
}

void destroy_graph(rm_graph* graph) {
  if (graph != nullptr && cudaGraphExecDestroy(exec_of(graph)) != cudaSuccess) cudaGetLastError();
}

size_t bytes_of(const rm_tensor& t) {
  size_t bytes = (t.dtype.bits * t.dtype.lanes + 7u) / 8u;
  for (int32_t i = 0; i < t.ndim; ++i) bytes *= static_cast<size_t>(t.shape[i]);
  return bytes;
}

struct CudaEvent final : plugin::Event {
  explicit CudaEvent(int device) {
    const DeviceScope scope(device);
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
  }
  ~CudaEvent() override { cudaEventDestroy(event); }
  void record(plugin::Stream& s) override {
    check_cuda(cudaEventRecord(event, static_cast<CudaStream&>(s).stream), "a recorded event");
  }
  void wait(plugin::Stream& s) override {
    check_cuda(cudaStreamWaitEvent(static_cast<CudaStream&>(s).stream, event, 0), "a wait");
  }
  bool ready() override {
    const cudaError_t e = cudaEventQuery(event);
    if (e == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_cuda(e, "work without errors");
    return true;
  }
  void sync() override { check_cuda(cudaEventSynchronize(event), "work without errors"); }

  cudaEvent_t event = nullptr;
};

class CudaDevice final : public plugin::Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    cudaDeviceProp p{};
    check_cuda(cudaGetDeviceProperties(&p, index), "a device's properties");
    int driver = 0, runtime = 0;
    check_cuda(cudaDriverGetVersion(&driver), "the driver's version");
    check_cuda(cudaRuntimeGetVersion(&runtime), "the runtime's version");
    name_ = p.name;
    arch_ = "sm_" + std::to_string(p.major) + std::to_string(p.minor);
    memory_ = p.totalGlobalMem;
    driver_ = std::to_string(driver);
    runtime_ = std::to_string(runtime);
    multiprocessors_ = std::to_string(p.multiProcessorCount);
    l2_ = std::to_string(p.l2CacheSize);
    properties_ = {{plugin::str("driver"), plugin::str(driver_)},
                   {plugin::str("runtime"), plugin::str(runtime_)},
                   {plugin::str("multiprocessors"), plugin::str(multiprocessors_)},
                   {plugin::str("l2_bytes"), plugin::str(l2_)},
                   {plugin::str("launch_ns"), plugin::str("2000")}};
  }

  rm_device_info info() const override {
    rm_device_info out{};
    out.struct_size = sizeof out;
    out.caps = RM_CAP_ASYNC | RM_CAP_CONCURRENT_EXECUTE | RM_CAP_GRAPH_CAPTURE;
    out.dl_device_type = kDLCUDA;
    out.dl_device_id = index_;
    out.memory_bytes = memory_;
    out.alignment = kAlignment;
    out.name = plugin::str(name_);
    out.arch = plugin::str(arch_);
    out.properties = {properties_.data(), properties_.size()};
    return out;
  }

  // What kernels give, and which are chosen, depends on all of this.
  std::string fingerprint() const override {
    return "cuda;build=" + build_id() + ";device=" + name_ + ";arch=" + arch_ + ";sm=" +
           multiprocessors_ + ";driver=" + driver_ + ";runtime=" + runtime_ +
           ";cublaslt=" + std::to_string(cuda_ops::GemmLibrary({}).version());
  }

  std::unique_ptr<plugin::Buffer> alloc(uint32_t, size_t bytes, size_t align) override {
    if ((align & (align - 1)) != 0) {
      throw plugin::Error(RM_INVALID_ARGUMENT,
                          "[cuda] expected a power-of-two alignment, got " + std::to_string(align));
    }
    return std::make_unique<DeviceBuffer>(index_, bytes, align);
  }
  std::unique_ptr<plugin::Stream> stream_create(uint32_t) override {
    const DeviceScope scope(index_);
    const RelaxedCapture relaxed;
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    return std::make_unique<CudaStream>(index_, stream, true);
  }
  std::unique_ptr<plugin::Stream> stream_wrap(void* native) override {
    return std::make_unique<CudaStream>(index_, static_cast<cudaStream_t>(native), false);
  }
  std::unique_ptr<plugin::Event> event_create() override {
    return std::make_unique<CudaEvent>(index_);
  }

 private:
  const int index_;
  std::string name_, arch_, driver_, runtime_, multiprocessors_, l2_;
  uint64_t memory_ = 0;
  std::vector<rm_option> properties_;
};

class CudaBackend final : public plugin::Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  std::string_view version() const override { return kVersion; }
  std::string_view build_id() const override { return cuda::build_id(); }

  // A node of the driver's, or Windows' in a Linux subsystem. No driver is loaded for it.
  int probe_score() noexcept override {
    const bool node = ::access("/dev/nvidiactl", F_OK) == 0 || ::access("/dev/dxg", F_OK) == 0;
    return node ? kScore : 0;
  }

  void initialize(rm_options) override { device_count(); }

  size_t device_count() override {
    int count = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaErrorNoDevice) {
      cudaGetLastError();
      return 0;
    }
    check_cuda(e, "an NVIDIA driver that fits CUDA 12 or later");
    return static_cast<size_t>(count);
  }

  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index >= device_count()) {
      throw plugin::Error(RM_NOT_FOUND, "[cuda] expected a device below " +
                                            std::to_string(device_count()) + ", got " +
                                            std::to_string(index));
    }
    return std::make_unique<CudaDevice>(static_cast<int>(index));
  }

  const void* extension(std::string_view name) noexcept override {
    static const rm_graphs graphs{sizeof(rm_graphs), begin_graph, end_graph, launch_graph,
                                  destroy_graph};
    if (name == RM_GRAPH_EXTENSION) return &graphs;
    if (name != RM_KERNELS_EXTENSION) return nullptr;
    static const std::vector<rm_kernel>& rows = *new std::vector<rm_kernel>(all_rows());
    static const rm_kernels table{sizeof(rm_kernels), rows.data(), rows.size(), sizeof(rm_kernel)};
    return &table;
  }
};

}  // namespace

CudaStream::~CudaStream() {
  const RelaxedCapture relaxed;
  if (owned) cudaStreamDestroy(stream);
}

void CudaStream::sync() {
  const RelaxedCapture relaxed;
  check_cuda(cudaStreamSynchronize(stream), "work without errors");
}

void CudaStream::copy(const rm_tensor& src, rm_tensor& dst) {
  const size_t bytes = bytes_of(src);
  if (bytes != bytes_of(dst)) {
    throw plugin::Error(RM_INVALID_ARGUMENT, "[cuda] expected two dense tensors of one size");
  }
  if (bytes == 0) return;
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  if (src.device.device_type == kDLCPU && dst.device.device_type == kDLCUDA && cuda_ops::writes(bytes)) {
    check_status(cuda_ops::write(static_cast<char*>(dst.data) + dst.byte_offset,
                                 static_cast<const char*>(src.data) + src.byte_offset, bytes, stream));
    return;
  }
  check_cuda(cudaMemcpyAsync(static_cast<char*>(dst.data) + dst.byte_offset,
                             static_cast<const char*>(src.data) + src.byte_offset, bytes,
                             cudaMemcpyDefault, stream),
             "a copy");
}

}  // namespace rm::cuda

RM_EXPORT_BACKEND(rm::cuda::CudaBackend)
