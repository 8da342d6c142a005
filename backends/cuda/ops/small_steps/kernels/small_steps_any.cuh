// One block goes through all parts; a barrier stands between them. An element or two a thread: latency of
// the parts, one behind the other, is the bound, and still less than that of as many launches. So the
// program waits in shared memory, where a launch's arguments are cold, and nothing is divided.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "ewise/kernels/ewise_registers.cuh"
#include "small_steps/kernels/small_steps_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallThreads = 1024;

struct SmallAt {
  int at[kSmallRank];
};

/// element / size: of numbers this small the product is nearer to the quotient than the next integer.
__device__ __forceinline__ int small_over(const SmallPart& p, int element, int d) {
  return static_cast<int>((static_cast<float>(element) + 0.5f) * p.share[d]);
}

__device__ __forceinline__ SmallAt small_at(const SmallPart& p, int element) {
  SmallAt out;
#pragma unroll
  for (int d = kSmallRank - 1; d >= 0; --d) {
    if (d >= p.rank) continue;
    const int outer = small_over(p, element, d);
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

/// Where a value lies, and what it is.
struct SmallValue {
  void* data;
  DType dtype;
};

__device__ inline void small_ewise(const SmallProgram& program, const SmallPart& p, const SmallValue* values) {
  EwiseRegister regs[kSmallOperands + kMaxInstructions];
  for (int e = threadIdx.x; e < p.count; e += kSmallThreads) {
    const SmallAt i = small_at(p, e);
    for (int o = 0; o < p.operands; ++o) {
      const SmallPlace& of = p.place[1 + o];
      regs[o] = ewise_load(values[of.slot].data, values[of.slot].dtype, small_offset(p, of, i));
    }
    for (int k = 0; k < p.b; ++k) {
      const SmallStep s = program.step[p.a + k];
      EwiseRegister& r = regs[p.operands + k];
      if (s.direct != 0) {
        const int a = s.step.a, b = s.step.b < 0 ? a : s.step.b, c = s.step.c < 0 ? a : s.step.c;
        r.f = apply_float<float>(s.step.opcode, regs[a].f, regs[b].f, regs[c].f);
        r.cls = 0;
      } else {
        r = ewise_result(s.step, program.imm, regs);
      }
    }
    const SmallPlace& to = p.place[0];
    ewise_store(values[to.slot].data, values[to.slot].dtype, small_offset(p, to, i), regs[p.operands + p.b - 1]);
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
      const int outer = small_over(p, rest, d), i = rest - outer * p.size[d];
      rest = outer;
      from += i * p.place[1].stride[d], to += i * p.place[0].stride[d];
    }
    T all = none;
    for (int r = lane; r < reduced; r += 32) {
      int at = from, left = r;
      for (int d = p.rank - 1; d >= 0; --d) {
        if (!(p.b >> d & 1)) continue;
        const int outer = small_over(p, left, d);
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
  const int n = p.size[p.rank - 1], rows = small_over(p, p.count, p.rank - 1), lane = threadIdx.x % 32;
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

__device__ inline void small_gather(const SmallPart& p, const SmallValue* values) {
  const SmallPlace &to = p.place[0], &x = p.place[1], &index = p.place[2];
  const auto load = [&](const SmallPlace& of, const SmallAt& at) {
    return ewise_load(values[of.slot].data, values[of.slot].dtype, small_offset(p, of, at));
  };
  for (int e = threadIdx.x; e < p.count; e += kSmallThreads) {
    SmallAt i = small_at(p, e);
    const std::int64_t id = load(index, i).as<std::int64_t>();
    const int out = small_offset(p, to, i);
    if (id < 0 || id >= p.b) __trap();
    i.at[p.a] = static_cast<int>(id);
    ewise_store(values[to.slot].data, values[to.slot].dtype, out, load(x, i));
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
  extern __shared__ uint4 small_values[];
  __shared__ SmallValue values[kSmallSlots];
  __shared__ SmallProgram program;
  if (threadIdx.x < static_cast<unsigned>(p.slots)) {
    void* outer = p.data[threadIdx.x];
    values[threadIdx.x].data =
        outer != nullptr ? outer : reinterpret_cast<char*>(small_values) + p.offset[threadIdx.x];
    values[threadIdx.x].dtype = p.dtype[threadIdx.x];
  }
  small_fetch(program.part, p.program.part, p.parts * static_cast<int>(sizeof(SmallPart)));
  small_fetch(program.step, p.program.step, p.steps * static_cast<int>(sizeof(SmallStep)));
  small_fetch(program.imm, p.program.imm, static_cast<int>(sizeof program.imm));
  overlap_begin(static_cast<const char*>(p.data[0]));
  __syncthreads();
  for (int s = 0; s < p.parts; ++s) {
    const SmallPart& part = program.part[s];
    const SmallValue to = values[part.place[0].slot], from = values[part.place[1].slot];
    switch (part.op) {
      case SmallOp::ewise:
        small_ewise(program, part, values);
        break;
      case SmallOp::reduce:
        if (from.dtype == DType::f64) {
          small_reduce(part, static_cast<const double*>(from.data), static_cast<double*>(to.data));
        } else {
          small_reduce(part, static_cast<const float*>(from.data), static_cast<float*>(to.data));
        }
        break;
      case SmallOp::softmax:
        small_softmax(part, static_cast<const float*>(from.data), static_cast<float*>(to.data));
        break;
      case SmallOp::gather:
        small_gather(part, values);
        break;
    }
    __syncthreads();
  }
}

}  // namespace rm::cuda_ops
