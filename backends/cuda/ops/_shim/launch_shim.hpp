// Launches whose blocks come to the multiprocessors while the stream's previous kernel ends: what a
// launch costs (constants, instructions, places for blocks) hides behind it. A kernel launched so
// begins with overlap_begin(), in all its blocks and before it touches memory that others write.
#pragma once

#include "_shim/dispatch_shim.hpp"

namespace rm::cuda_ops {

/// How a kernel is launched. Clusters of blocks and launches that overlap the stream's previous
/// kernel exist from sm_90 on: there is one gate for both, below.
struct Launch {
  dim3 blocks, threads;
  std::size_t shared = 0;  // bytes
  unsigned cluster = 1;    // neighbouring blocks; more than one only where sm90_why_not() is null
  bool overlap = false;    // by programmatic dependent launch; elsewhere an ordinary one
};

/// The configuration of a launch, with its attributes; it must not move.
class LaunchConfig {
 public:
  LaunchConfig(const Launch& how, Stream stream) {
    config_.gridDim = how.blocks, config_.blockDim = how.threads;
    config_.dynamicSmemBytes = how.shared, config_.stream = stream, config_.attrs = attributes_;
    if (compute_capability() < 90) return;
    if (how.overlap) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes_[config_.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cluster > 1) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes_[config_.numAttrs++].val.clusterDim = {how.cluster, 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_{};
};

/// kernel(arguments...); the status is of this launch, not of what the thread did before.
template <class... P, class... A>
Status launch(const char* op, void (*kernel)(P...), const Launch& how, Stream stream,
              A&&... arguments) {
  const LaunchConfig config(how, stream);
  const cudaError_t e = cudaLaunchKernelEx(config.get(), kernel, std::forward<A>(arguments)...);
  if (e != cudaSuccess) cudaGetLastError();
  return cuda_status(op, e, "a launch without errors");
}

/// kernel(arguments...) in clusters of neighbouring blocks.
template <class... P, class... A>
Status launch_clusters(const char* op, void (*kernel)(P...), unsigned cluster, dim3 blocks,
                       dim3 threads, std::size_t shared, Stream stream, A&&... arguments) {
  return launch(op, kernel, {blocks, threads, shared, cluster, true}, stream,
                std::forward<A>(arguments)...);
}

template <class... P, class... A>
Status launch_overlapped(const char* op, void (*kernel)(P...), dim3 blocks, dim3 threads,
                         std::size_t shared, Stream stream, A&&... arguments) {
  return launch(op, kernel, {blocks, threads, shared, 1, true}, stream,
                std::forward<A>(arguments)...);
}

/// Clusters of such blocks that run at once; 0 where there are none.
template <class Kernel>
int clusters_at_once(Kernel* kernel, const Launch& how) {
  int count = 0;
  const LaunchConfig config(how, nullptr);
  if (cudaOccupancyMaxActiveClusters(&count, kernel, config.get()) == cudaSuccess) return count;
  cudaGetLastError();  // a launch will say what is wrong
  return 0;
}

#ifdef __CUDACC__
/// Whether this build is for cards, too, whose blocks have less shared memory than Hopper's.
constexpr bool builds_for_small_blocks() {
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture != 900 && architecture / 100 != 10) return true;
  }
  return false;
}

/// fn(Large{}) where a block may have that much shared memory, else fn(Small{}).
template <class Large, class Small, class Fn>
auto with_fitting(Fn&& fn) {
  if constexpr (builds_for_small_blocks()) {
    if (shared_why_not(Large::kMemory)) return fn(Small{});
  }
  return fn(Large{});
}

/// Before overlap_begin, by one thread: asks for `bytes` (a multiple of 16) that the block reads
/// first. Only as far as the L2 cache, where the previous kernel's writes arrive too, so they may
/// still be under way. Blocks that start later than the first ones have nothing to gain.
__device__ __forceinline__ void overlap_ask(const void* from, std::int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  if (blockIdx.x + blockIdx.y * gridDim.x >= 1024 || bytes <= 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from),
               "r"(static_cast<std::uint32_t>(bytes))
               : "memory");
#endif
}

/// The next kernel's blocks may come; the previous kernel's writes are visible. `touched`: pointers
/// among the arguments, brought from constant memory before the wait.
template <class... V>
__device__ __forceinline__ void overlap_begin(const V*... touched) {
  (([](const void* p) { asm volatile("" ::"l"(p)); })(touched), ...);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace rm::cuda_ops
