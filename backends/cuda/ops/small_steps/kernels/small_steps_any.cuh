// One block goes through all parts; a barrier stands between them. A few elements a thread: latency of
// the parts, one behind the other, is the bound, and still less than that of as many launches.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "ewise/kernels/ewise_registers.cuh"
#include "small_steps/kernels/small_steps_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallThreads = 512;

struct SmallAt {
  int at[kSmallRank];
};

__device__ __forceinline__ SmallAt small_at(const SmallPart& p, int element) {
  SmallAt out;
#pragma unroll
  for (int d = kSmallRank - 1; d >= 0; --d) {
    if (d >= p.rank) continue;
    const int outer = element / p.size[d];
    out.at[d] = element - outer * p.size[d];
    element = outer;
  }
  return out;
}

__device__ __forceinline__ int small_offset(const SmallPart& p, const SmallPlace& of, const SmallAt& i) {
  int out = of.offset;
#pragma unroll
  for (int d = 0; d < kSmallRank; ++d) {
    if (d < p.rank) out += i.at[d] * of.stride[d];
  }
  return out;
}

__device__ __forceinline__ int small_count(const SmallPart& p) {
  int out = 1;
  for (int d = 0; d < p.rank; ++d) out *= p.size[d];
  return out;
}

__device__ inline void small_ewise(const SmallStepsArgs& args, const SmallPart& p, void* const* base) {
  EwiseRegister regs[kSmallOperands + kMaxInstructions];
  const int count = small_count(p);
  for (int e = threadIdx.x; e < count; e += kSmallThreads) {
    const SmallAt i = small_at(p, e);
    for (int o = 0; o < p.operands; ++o) {
      const SmallPlace& of = p.place[1 + o];
      regs[o] = ewise_load(base[of.slot], args.dtype[of.slot], small_offset(p, of, i));
    }
    for (int k = 0; k < p.b; ++k) {
      regs[p.operands + k] = ewise_result(args.step[p.a + k], args.imm, regs);
    }
    const SmallPlace& to = p.place[0];
    ewise_store(base[to.slot], args.dtype[to.slot], small_offset(p, to, i), regs[p.operands + p.b - 1]);
  }
}

template <class T>
__device__ __forceinline__ T small_joined(int kind, T a, T b) {
  if (kind == 2) return a > b || a != a ? a : b;  // NaN wins
  if (kind == 3) return a < b || a != a ? a : b;
  return a + b;
}

/// A warp a result; its order of sums is fixed.
template <class T>
__device__ inline void small_reduce(const SmallPart& p, const T* x, T* y) {
  int kept = 1, reduced = 1;
  for (int d = 0; d < p.rank; ++d) (p.b >> d & 1 ? reduced : kept) *= p.size[d];
  const int lane = threadIdx.x % 32;
  const T none = p.a == 2 ? static_cast<T>(-INFINITY) : p.a == 3 ? static_cast<T>(INFINITY) : T(0);
  for (int o = threadIdx.x / 32; o < kept; o += kSmallThreads / 32) {
    int from = p.place[1].offset, to = p.place[0].offset, rest = o;
    for (int d = p.rank - 1; d >= 0; --d) {
      if (p.b >> d & 1) continue;
      const int outer = rest / p.size[d], i = rest - outer * p.size[d];
      rest = outer;
      from += i * p.place[1].stride[d], to += i * p.place[0].stride[d];
    }
    T all = none;
    for (int r = lane; r < reduced; r += 32) {
      int at = from, left = r;
      for (int d = p.rank - 1; d >= 0; --d) {
        if (!(p.b >> d & 1)) continue;
        const int outer = left / p.size[d];
        at += (left - outer * p.size[d]) * p.place[1].stride[d];
        left = outer;
      }
      all = small_joined(p.a, all, x[at]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      all = small_joined(p.a, all, __shfl_xor_sync(0xffffffffu, all, step));
    }
    if (lane == 0) y[to] = p.a == 1 ? all / static_cast<T>(reduced) : all;
  }
}

/// A warp a row of the last axis.
__device__ inline void small_softmax(const SmallPart& p, const float* x, float* y) {
  const int n = p.size[p.rank - 1], rows = small_count(p) / n, lane = threadIdx.x % 32;
  const int x_step = p.place[1].stride[p.rank - 1], y_step = p.place[0].stride[p.rank - 1];
  for (int row = threadIdx.x / 32; row < rows; row += kSmallThreads / 32) {
    const SmallAt i = small_at(p, row * n);
    const float* from = x + small_offset(p, p.place[1], i);
    float* to = y + small_offset(p, p.place[0], i);
    float most = -INFINITY, sum = 0;
    for (int k = lane; k < n; k += 32) most = small_joined(2, most, from[k * x_step]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      most = small_joined(2, most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    for (int k = lane; k < n; k += 32) sum += expf(from[k * x_step] - most);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float log = logf(sum), scale = 1.0f / sum;
    for (int k = lane; k < n; k += 32) {
      const float v = from[k * x_step] - most;
      to[k * y_step] = p.a != 0 ? v - log : expf(v) * scale;
    }
  }
}

__device__ inline void small_gather(const SmallStepsArgs& args, const SmallPart& p, void* const* base) {
  const SmallPlace &to = p.place[0], &x = p.place[1], &index = p.place[2];
  const int count = small_count(p);
  for (int e = threadIdx.x; e < count; e += kSmallThreads) {
    SmallAt i = small_at(p, e);
    const std::int64_t id =
        ewise_load(base[index.slot], args.dtype[index.slot], small_offset(p, index, i)).as<std::int64_t>();
    const int out = small_offset(p, to, i);
    if (id < 0 || id >= p.b) __trap();
    i.at[p.a] = static_cast<int>(id);
    ewise_store(base[to.slot], args.dtype[to.slot], out,
                ewise_load(base[x.slot], args.dtype[x.slot], small_offset(p, x, i)));
  }
}

static __global__ void __launch_bounds__(kSmallThreads)
    small_steps_block(const __grid_constant__ SmallStepsArgs p) {
  extern __shared__ uint4 small_values[];
  __shared__ void* base[kSmallSlots];
  if (threadIdx.x < static_cast<unsigned>(p.slots)) {
    void* outer = p.data[threadIdx.x];
    base[threadIdx.x] =
        outer != nullptr ? outer : reinterpret_cast<char*>(small_values) + p.offset[threadIdx.x];
  }
  overlap_begin(static_cast<const char*>(p.data[0]));
  __syncthreads();
  for (int s = 0; s < p.parts; ++s) {
    const SmallPart& part = p.part[s];
    void *to = base[part.place[0].slot], *from = base[part.place[1].slot];
    switch (part.op) {
      case SmallOp::ewise:
        small_ewise(p, part, base);
        break;
      case SmallOp::reduce:
        if (p.dtype[part.place[1].slot] == DType::f64) {
          small_reduce(part, static_cast<const double*>(from), static_cast<double*>(to));
        } else {
          small_reduce(part, static_cast<const float*>(from), static_cast<float*>(to));
        }
        break;
      case SmallOp::softmax:
        small_softmax(part, static_cast<const float*>(from), static_cast<float*>(to));
        break;
      case SmallOp::gather:
        small_gather(p, part, base);
        break;
    }
    __syncthreads();
  }
}

}  // namespace rm::cuda_ops
