// The part of cuBLASLt's C interface used here (versions 12 and 13), declared by us so that
// building needs no header of it and importing needs no library.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace rm::cuda_ops::lt {

using Handle = void*;
using MatmulDesc = void*;
using Layout = void*;
using Preference = void*;

struct Algo {
  std::uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  std::size_t workspace_bytes;
  int state;  // 0: usable
  float waves;
  int reserved[4];
};

// cublasStatus_t, those that mean "not this product by this algorithm"
inline constexpr int kInvalidValue = 7, kNotSupported = 15;
inline constexpr int kCompute32F = 68, kComputeTf32 = 77;
inline constexpr int kTypeF32 = 0, kTypeF16 = 2, kTypeBf16 = 14;
// attributes of a product
inline constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8, kAuxPointer = 11,
                     kAuxPitch = 12, kAuxBatchStride = 13;
// attributes of a matrix
inline constexpr int kBatchCount = 5, kBatchOffset = 6;
// attributes of a search
inline constexpr int kMaxWorkspace = 1, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7,
                     kAlignmentD = 8;

struct Functions {
  std::size_t (*get_version)();
  int (*create)(Handle*);
  int (*destroy)(Handle);
  int (*desc_create)(MatmulDesc*, int compute, int scale_type);
  int (*desc_destroy)(MatmulDesc);
  int (*desc_set)(MatmulDesc, int attribute, const void*, std::size_t);
  int (*layout_create)(Layout*, int type, std::uint64_t rows, std::uint64_t columns,
                       std::int64_t pitch);
  int (*layout_destroy)(Layout);
  int (*layout_set)(Layout, int attribute, const void*, std::size_t);
  int (*preference_create)(Preference*);
  int (*preference_destroy)(Preference);
  int (*preference_set)(Preference, int attribute, const void*, std::size_t);
  int (*heuristic)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                   int wanted, HeuristicResult*, int* found);
  int (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b, Layout,
                const void* beta, const void* c, Layout, void* d, Layout, const Algo*,
                void* workspace, std::size_t, cudaStream_t);
};

}  // namespace rm::cuda_ops::lt
