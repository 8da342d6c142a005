// Launches whose blocks come to the multiprocessors while the stream's previous kernel ends: what a
// launch costs (constants, instructions, places for blocks) hides behind it. A kernel launched so
// begins with overlap_begin(), in all its blocks and before it touches memory that others write.
#pragma once

#include "_shim/dispatch_shim.hpp"

namespace rm::cuda_ops {

/// kernel(arguments...) in clusters of neighbouring blocks; the status is of the launch.
template <class... P, class... A>
Status launch_clusters(const char* op, void (*kernel)(P...), unsigned cluster, dim3 blocks,
                       dim3 threads, std::size_t shared, Stream stream, A&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads;
  config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = compute_capability() < 90 ? 0 : cluster > 1 ? 2 : 1;
  return cuda_status(op, cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...),
                     "a launch without errors");
}

template <class... P, class... A>
Status launch_overlapped(const char* op, void (*kernel)(P...), dim3 blocks, dim3 threads,
                         std::size_t shared, Stream stream, A&&... arguments) {
  return launch_clusters(op, kernel, 1, blocks, threads, shared, stream,
                         std::forward<A>(arguments)...);
}

#ifdef __CUDACC__
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
