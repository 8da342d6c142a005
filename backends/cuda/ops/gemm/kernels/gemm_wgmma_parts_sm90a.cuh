// Where the blocks of a cluster meet in the wgmma gemm, and add up the parts of K that they took.
#pragma once

#include "gemm/kernels/wgmma_ring_sm90a.cuh"

namespace rm::cuda_ops {

/// The cluster's blocks have started; barrier_init_done has released what the others must see.
__device__ __forceinline__ void cluster_start() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

/// Where all threads of a cluster meet and see what the others have written. Not by barriers in
/// shared memory: compute-sanitizer's racecheck follows this one.
struct ClusterMeeting {
  bool left = false;  // this thread has said that it has read the others' parts

  __device__ __forceinline__ void arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
  __device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
  __device__ __forceinline__ void write() {  // once all have left the unit before
    if (left) wait();
    left = false;
  }
  __device__ __forceinline__ void read() { arrive(), wait(); }
  __device__ __forceinline__ void leave() { arrive(), left = true; }
};

/// The parts of K that a tile was cut into meet: afterwards acc holds the sums in the chunks of 64
/// columns that this block owns.
template <int kN>
struct WgmmaSums {
  std::uint32_t memory;
  int cluster, rank, group, thread;

  __device__ __forceinline__ bool owns(int chunk) const {
    return (chunk + group * (kN / 64)) % cluster == rank;
  }
  __device__ __forceinline__ std::uint32_t place(int chunk, int i) const {
    return memory + ((chunk * 8 + i) * 256 + group * 128 + thread) * 16;
  }
  __device__ __forceinline__ void run(float (&acc)[kN / 2], ClusterMeeting& meeting) {
    meeting.write();
#pragma unroll
    for (int c = 0; c < kN / 64; ++c) {
      if (owns(c)) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) store_shared(place(c, i), acc + c * 32 + i * 4);
    }
    meeting.read();
#pragma unroll
    for (int c = 0; c < kN / 64; ++c) {
      if (!owns(c)) continue;
      for (int other = 0; other < cluster; ++other) {
        if (other == rank) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float4 v = load_in_block(place(c, i), other);
          float* sum = acc + c * 32 + i * 4;
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
    }
    meeting.leave();
  }
};

}  // namespace rm::cuda_ops
