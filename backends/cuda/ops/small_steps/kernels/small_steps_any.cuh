// One block goes through all parts, others beside it take elements of those that need no other parts
// (SmallHead::split); a barrier stands where a part reads what other threads made. Parts
// between two barriers belong to different warps where they are small, so that they run beside each other.
// An element or two a thread: the instructions between two barriers, one behind the other, are the bound,
// and still less than as many launches. (That much of it is instructions and arguments on their way from
// memory, which kernels between two launches displaced, is a suspicion: stalls were not measured.) So the
// program waits in shared memory; what a part is and where its values lie is each read at once; elements
// that lie evenly are found by one multiplication, and nothing is divided.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "small_steps/kernels/small_values.cuh"

namespace rm::cuda_ops {

struct SmallAt {
  int at[kSmallRank];
};

/// element / size: of numbers this small the product is nearer to the quotient than the next integer.
__device__ __forceinline__ int small_over(const SmallPart& p, int element, int d) {
  return static_cast<int>((static_cast<float>(element) + 0.5f) * p.share[d]);
}

/// Coordinates of an element; sizes beyond the rank are 1.
__device__ __forceinline__ SmallAt small_at(const SmallPart& p, int element) {
  SmallAt out;
#pragma unroll
  for (int d = kSmallRank - 1; d >= 0; --d) {
    const int outer = small_over(p, element, d);
    out.at[d] = element - outer * p.size[d];
    element = outer;
  }
  return out;
}

__device__ __forceinline__ int small_offset(const SmallPlace& of, const SmallAt& i) {
  int out = 0;
#pragma unroll
  for (int d = 0; d < kSmallRank; ++d) out += i.at[d] * of.stride[d];  // 0 beyond the rank
  return out;
}

__device__ __forceinline__ int small_place(const SmallPlace& of, int element, const SmallAt& i) {
  return of.even != 0 ? element * of.step : small_offset(of, i);
}

/// The number of this thread among those that a part belongs to; others have numbers behind them.
__device__ __forceinline__ int small_thread(const SmallHead& h) {
  return (threadIdx.x - h.warp * 32) & (kSmallThreads - 1);
}

/// kWide elements of a thread at a time: what an instruction costs is mostly its reading and its branch. Each is
/// the part's threads behind the one before; those behind the last are the last again, and are not stored.
template <int kWide>
__device__ __forceinline__ void small_ewise(const SmallProgram& program, const SmallPart& p, const SmallHead& h) {
  constexpr int kAtOnce = 3;  // few have more operands
  SmallRegister regs[kSmallOperands + kMaxInstructions][kWide];
  const int threads = h.warps * 32;
  const int block = h.split != 0 ? blockIdx.x : 0, blocks = h.split != 0 ? gridDim.x : 1;
  for (int first = small_thread(h) + block * kWide * threads; first < h.count; first += blocks * kWide * threads) {
    int e[kWide];
    SmallAt i[kWide];
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      e[w] = min(first + w * threads, h.count - 1);
      i[w] = h.uneven != 0 ? small_at(p, e[w]) : SmallAt{};
    }
    SmallPlace of[kAtOnce];
#pragma unroll
    for (int o = 0; o < kAtOnce; ++o) of[o] = p.place[1 + o];
#pragma unroll
    for (int o = 0; o < kAtOnce; ++o) {
      if (o >= h.operands) break;
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        regs[o][w] = small_load(of[o].data, of[o].dtype, small_place(of[o], e[w], i[w]));
      }
    }
#pragma unroll 1
    for (int o = kAtOnce; o < h.operands; ++o) {
      const SmallPlace& more = p.place[1 + o];
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        regs[o][w] = small_load(more.data, more.dtype, small_place(more, e[w], i[w]));
      }
    }
    SmallRegister last[kWide] = {};
#pragma unroll 1
    for (int k = 0; k < h.steps; ++k) {
      const SmallStep s = program.step[h.first + k];
      small_step<kWide>(program.step[h.first + k], s.code, regs[s.a], regs[s.b], regs[s.c], last);
#pragma unroll
      for (int w = 0; w < kWide; ++w) regs[h.operands + k][w] = last[w];
    }
    const SmallPlace to = p.place[0];
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      if (first + w * threads >= h.count) break;
      small_store(to.data, to.dtype, small_place(to, e[w], i[w]), last[w], h.cls);
    }
  }
}

template <class T>
__device__ __forceinline__ T small_joined(int kind, T a, T b) {
  if (kind == 2) return a > b || a != a ? a : b;  // NaN wins
  if (kind == 3) return a < b || a != a ? a : b;
  return a + b;
}

/// Where a result of an uneven reduction or what it joins lies; `of`: the axes that the number counts.
__device__ __noinline__ static int small_among(const SmallPart& p, const SmallPlace& place, int number, int of) {
  int out = 0;
#pragma unroll 1
  for (int d = kSmallRank - 1; d >= 0; --d) {
    if (!(of >> d & 1)) continue;
    const int outer = small_over(p, number, d);
    out += (number - outer * p.size[d]) * place.stride[d];
    number = outer;
  }
  return out;
}

/// A warp a result; its order of sums is fixed.
template <class T>
__device__ __forceinline__ void small_reduce(const SmallPart& p, const SmallHead& h) {
  const T* x = reinterpret_cast<const T*>(p.place[1].data);
  T* y = reinterpret_cast<T*>(p.place[0].data);
  const int lane = threadIdx.x % 32, from_step = p.from, to_step = p.to, along = p.along, reduced = h.first;
  const T none = h.kind == 2 ? static_cast<T>(-INFINITY) : h.kind == 3 ? static_cast<T>(INFINITY) : T(0);
  for (int o = small_thread(h) / 32; o < h.count; o += h.warps) {
    int from = o * from_step, to = o * to_step;
    if (h.uneven != 0) from = small_among(p, p.place[1], o, ~p.axes), to = small_among(p, p.place[0], o, ~p.axes);
    T all = none;
#pragma unroll 2
    for (int r = lane; r < reduced; r += 32) {
      const int at = h.uneven != 0 ? small_among(p, p.place[1], r, p.axes) : r * along;
      all = small_joined(h.kind, all, x[from + at]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      all = small_joined(h.kind, all, __shfl_xor_sync(0xffffffffu, all, step));
    }
    if (lane == 0) y[to] = h.kind == 1 ? all / static_cast<T>(reduced) : all;
  }
}

static __device__ __noinline__ void small_reduce_double(const SmallPart& p, const SmallHead& h) {
  small_reduce<double>(p, h);
}

/// kLanes lanes a row of the last axis, of at most kLanes * kEach values.
template <int kLanes, int kEach>
__device__ __forceinline__ void small_softmax_rows(const SmallPart& p, const SmallHead& h) {
  const int n = p.size[kSmallRank - 1], rows = h.count, lane = threadIdx.x % kLanes;
  const SmallPlace x = p.place[1], y = p.place[0];
  const int x_step = x.stride[kSmallRank - 1], y_step = y.stride[kSmallRank - 1];
  for (int first = threadIdx.x / 32 * 32; first / kLanes < rows; first += kSmallThreads) {  // a warp stays whole
    const int row = min((first + static_cast<int>(threadIdx.x % 32)) / kLanes, rows - 1);
    const SmallAt i = small_at(p, row * n);
    const float* from = reinterpret_cast<const float*>(x.data) + small_offset(x, i);
    float* to = reinterpret_cast<float*>(y.data) + small_offset(y, i);
    float v[kEach], most = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = lane + k * kLanes < n ? from[(lane + k * kLanes) * x_step] : -INFINITY;
#pragma unroll
    for (int k = 0; k < kEach; ++k) most = lane + k * kLanes < n ? small_joined(2, most, v[k]) : most;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) most = small_joined(2, most, __shfl_xor_sync(0xffffffffu, most, step));
    float e[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) e[k] = lane + k * kLanes < n ? expf(v[k] - most) : 0.0f, sum += e[k];
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float log = h.kind != 0 ? logf(sum) : 0.0f, scale = 1.0f / sum;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (lane + k * kLanes < n) to[(lane + k * kLanes) * y_step] = h.kind != 0 ? v[k] - most - log : e[k] * scale;
    }
  }
}

/// A warp a row of the last axis, of any length.
static __device__ __noinline__ void small_softmax_long(const SmallPart& p, const SmallHead& h) {
  const int n = p.size[kSmallRank - 1], lane = threadIdx.x % 32;
  const SmallPlace x = p.place[1], y = p.place[0];
  const int x_step = x.stride[kSmallRank - 1], y_step = y.stride[kSmallRank - 1];
  for (int row = threadIdx.x / 32; row < h.count; row += kSmallThreads / 32) {
    const SmallAt i = small_at(p, row * n);
    const float* from = reinterpret_cast<const float*>(x.data) + small_offset(x, i);
    float* to = reinterpret_cast<float*>(y.data) + small_offset(y, i);
    float most = -INFINITY, sum = 0;
    for (int k = lane; k < n; k += 32) most = small_joined(2, most, from[k * x_step]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = small_joined(2, most, __shfl_xor_sync(0xffffffffu, most, step));
    for (int k = lane; k < n; k += 32) sum += expf(from[k * x_step] - most);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float log = logf(sum), scale = 1.0f / sum;
    for (int k = lane; k < n; k += 32) {
      const float v = from[k * x_step] - most;
      to[k * y_step] = h.kind != 0 ? v - log : expf(v) * scale;
    }
  }
}

__device__ __forceinline__ void small_gather(const SmallPart& p, const SmallHead& h) {
  const SmallPlace to = p.place[0], x = p.place[1], index = p.place[2];
  const int axis = p.axes;
  for (int e = small_thread(h); e < h.count; e += h.warps * 32) {
    const SmallAt i = small_at(p, e);
    const std::int64_t id = small_load(index.data, index.dtype, small_offset(index, i)).i;
    if (id < 0 || id >= h.first) __trap();
    int at = 0;
#pragma unroll
    for (int d = 0; d < kSmallRank; ++d) at += (d == axis ? static_cast<int>(id) : i.at[d]) * x.stride[d];
    small_store(to.data, to.dtype, small_offset(to, i), small_load(x.data, x.dtype, at), h.cls);
  }
}

/// The used part of the program, 16 bytes a thread at a time.
__device__ __forceinline__ void small_fetch(void* to, const void* from, int bytes) {
  asm volatile("" : "+l"(from));  // an address: constant memory gives each thread its own one by one
  for (int i = threadIdx.x; i < bytes / 16; i += kSmallThreads) {
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  }
}

static __global__ void __launch_bounds__(kSmallThreads)
    small_steps_block(const __grid_constant__ SmallStepsArgs p) {
  extern __shared__ uint4 small_memory[];
  __shared__ SmallProgram program;
  small_fetch(program.part, p.program.part, p.parts * static_cast<int>(sizeof(SmallPart)));
  small_fetch(program.step, p.program.step, p.steps * static_cast<int>(sizeof(SmallStep)));
  __syncthreads();
  for (int i = threadIdx.x; i < p.parts * (1 + kSmallOperands); i += kSmallThreads) {
    SmallPlace& place = program.part[i / (1 + kSmallOperands)].place[i % (1 + kSmallOperands)];
    if (place.inner != 0) place.data = reinterpret_cast<char*>(small_memory) + reinterpret_cast<std::uintptr_t>(place.data);
  }
  overlap_begin(static_cast<const char*>(p.first));
  __syncthreads();
#pragma unroll 1
  for (int s = 0; s < p.parts; ++s) {
    const SmallPart& part = program.part[s];
    const SmallHead head = part.head;
    if (blockIdx.x != 0 && head.split == 0) continue;
    if (head.meet != 0) __syncthreads();
    if (small_thread(head) >= head.warps * 32) continue;
    if (head.op == SmallOp::ewise) {
      if (head.count > head.warps * 32 && head.split == 0) {
        small_ewise<4>(program, part, head);
      } else {
        small_ewise<1>(program, part, head);
      }
    } else if (head.op == SmallOp::reduce) {
      if (part.place[1].dtype == DType::f64) {
        small_reduce_double(part, head);
      } else {
        small_reduce<float>(part, head);
      }
    } else if (head.op == SmallOp::softmax) {
      const int n = part.size[kSmallRank - 1];
      if (n <= 32) {
        small_softmax_rows<8, 4>(part, head);
      } else {
        small_softmax_long(part, head);
      }
    } else {
      small_gather(part, head);
    }
  }
}

}  // namespace rm::cuda_ops
