// The part of oneDNN's C interface (version 3) that gemm and conv call, found at run time with dlopen.
//
// Only constants and signatures of the published C ABI are declared here; no header of the library
// is needed to build, and a machine without it loses one row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rm::cpu::gemm::onednn {

using Handle = void*;  // every dnnl_*_t is a pointer to an opaque struct
struct Argument {
  int id;
  Handle memory;
};

enum DataType : int { kHalf = 1, kBfloat = 2, kFloat = 3 };
enum Algorithm : int {
  kEltRelu = 32,
  kEltTanh = 33,
  kEltLinear = 38,
  kEltLogistic = 41,
  kEltGeluTanh = 43,
  kEltSwish = 44,
  kEltGeluErf = 49,
  kEltHardSwish = 52,
  kBinaryAdd = 131056
};
enum ArgumentId : int {
  kArgSource = 1,  // also "from"
  kArgSource1 = 2,
  kArgResult = 17,  // also "to"
  kArgWeights = 33,
  kArgBias = 41,
  kArgScratchpad = 80,
  kArgPostOp = 32768  // times (position + 1)
};
enum Query : int {
  kQueryStrides = 14,
  kQueryWeights = 131,
  kQueryScratchpad = 136,
  kQueryPaddedDims = 260,
  kQueryInnerCount = 263,
  kQueryInnerBlocks = 264,
  kQueryInnerAxes = 265
};
constexpr int kForwardInference = 96, kConvolutionDirect = 1, kDeconvolutionDirect = 10;
constexpr int kMaxDims = 12;
constexpr int kEngineCpu = 1, kFormatAny = 1, kScratchpadUser = 1, kStreamInOrder = 1;

struct Version {
  int major, minor, patch;  // the library's struct goes on; only these are read
};

// name, parameters
#define RM_ONEDNN_FUNCTIONS(X)                                                               \
  X(engine_create, (Handle*, int, size_t))                                                   \
  X(stream_create, (Handle*, Handle, unsigned))                                              \
  X(stream_destroy, (Handle))                                                                \
  X(memory_desc_create_with_strides, (Handle*, int, const int64_t*, int, const int64_t*))    \
  X(memory_desc_create_with_tag, (Handle*, int, const int64_t*, int, int))                   \
  X(memory_desc_query, (Handle, int, void*))                                                 \
  X(memory_desc_destroy, (Handle))                                                           \
  X(memory_create, (Handle*, Handle, Handle, void*))                                         \
  X(memory_set_data_handle, (Handle, void*))                                                 \
  X(memory_destroy, (Handle))                                                                \
  X(post_ops_create, (Handle*))                                                              \
  X(post_ops_append_eltwise, (Handle, int, float, float))                                    \
  X(post_ops_append_binary, (Handle, int, Handle))                                           \
  X(post_ops_destroy, (Handle))                                                              \
  X(primitive_attr_create, (Handle*))                                                        \
  X(primitive_attr_set_post_ops, (Handle, Handle))                                           \
  X(primitive_attr_set_scratchpad_mode, (Handle, int))                                       \
  X(primitive_attr_destroy, (Handle))                                                        \
  X(matmul_primitive_desc_create, (Handle*, Handle, Handle, Handle, Handle, Handle, Handle)) \
  X(convolution_forward_primitive_desc_create,                                               \
    (Handle*, Handle, int, int, Handle, Handle, Handle, Handle, const int64_t*,              \
     const int64_t*, const int64_t*, const int64_t*, Handle))                                \
  X(deconvolution_forward_primitive_desc_create,                                             \
    (Handle*, Handle, int, int, Handle, Handle, Handle, Handle, const int64_t*,              \
     const int64_t*, const int64_t*, const int64_t*, Handle))                                \
  X(reorder_primitive_desc_create, (Handle*, Handle, Handle, Handle, Handle, Handle))        \
  X(primitive_desc_destroy, (Handle))                                                        \
  X(primitive_create, (Handle*, Handle))                                                     \
  X(primitive_execute, (Handle, Handle, int, const Argument*))                               \
  X(primitive_destroy, (Handle))

struct Api {
#define RM_ONEDNN_MEMBER(name, parameters) int(*name) parameters = nullptr;
  RM_ONEDNN_FUNCTIONS(RM_ONEDNN_MEMBER)
#undef RM_ONEDNN_MEMBER
  size_t (*memory_desc_get_size)(Handle) = nullptr;
  Handle (*primitive_desc_query_md)(Handle, int, int) = nullptr;
  const Version* (*version)() = nullptr;

  Handle engine = nullptr;
  std::string version_text;
  std::string why_not;  // empty when usable
};

/// The memory layout of a descriptor of `rank` axes in words: equal words, equal bytes.
std::string layout_text(Handle md, int rank);

/// Loads the library on first use: option "onednn_path", then libdnnl.so.3.
const Api& api();

}  // namespace rm::cpu::gemm::onednn
