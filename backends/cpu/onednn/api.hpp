// oneDNN's C interface (version 3), found at run time with dlopen: a machine without the library
// loses some rows, and the plugin loads all the same. Types and constants are the header's.
#pragma once

#include <oneapi/dnnl/dnnl.h>

#include <memory>
#include <string>

namespace rm::cpu::onednn {

#define RM_ONEDNN_FUNCTIONS(X)                 \
  X(engine_create)                             \
  X(stream_create)                             \
  X(stream_destroy)                            \
  X(memory_desc_create_with_strides)           \
  X(memory_desc_create_with_tag)               \
  X(memory_desc_query)                         \
  X(memory_desc_get_size)                      \
  X(memory_desc_destroy)                       \
  X(memory_create)                             \
  X(memory_set_data_handle)                    \
  X(memory_destroy)                            \
  X(post_ops_create)                           \
  X(post_ops_append_eltwise)                   \
  X(post_ops_append_binary)                    \
  X(post_ops_destroy)                          \
  X(primitive_attr_create)                     \
  X(primitive_attr_set_post_ops)               \
  X(primitive_attr_set_scratchpad_mode)        \
  X(primitive_attr_destroy)                    \
  X(matmul_primitive_desc_create)              \
  X(convolution_forward_primitive_desc_create) \
  X(deconvolution_forward_primitive_desc_create) \
  X(reorder_primitive_desc_create)             \
  X(primitive_desc_query_md)                   \
  X(primitive_desc_destroy)                    \
  X(primitive_create)                          \
  X(primitive_execute)                         \
  X(primitive_destroy)                         \
  X(version)

struct Api {
#define RM_ONEDNN_MEMBER(name) decltype(&::dnnl_##name) name = nullptr;
  RM_ONEDNN_FUNCTIONS(RM_ONEDNN_MEMBER)
#undef RM_ONEDNN_MEMBER

  dnnl_engine_t engine = nullptr;
  std::string version_text;
  std::string why_not;  // empty when usable
};

/// Loads the library on first use: option "onednn_path", then libdnnl.so.3.
const Api& api();

/// Destroys an object of the library by the function that `member` points to.
template <auto member>
struct Destroyer {
  template <class T>
  void operator()(T* object) const {
    (api().*member)(object);
  }
};
using Description = std::unique_ptr<dnnl_memory_desc, Destroyer<&Api::memory_desc_destroy>>;
using Attributes = std::unique_ptr<dnnl_primitive_attr, Destroyer<&Api::primitive_attr_destroy>>;
using PostOps = std::unique_ptr<dnnl_post_ops, Destroyer<&Api::post_ops_destroy>>;
using Memory = std::unique_ptr<dnnl_memory, Destroyer<&Api::memory_destroy>>;
using Stream = std::unique_ptr<dnnl_stream, Destroyer<&Api::stream_destroy>>;
using PrimitiveDescription =
    std::unique_ptr<dnnl_primitive_desc, Destroyer<&Api::primitive_desc_destroy>>;
using Executable = std::unique_ptr<dnnl_primitive, Destroyer<&Api::primitive_destroy>>;

/// The memory layout of a description of `rank` axes in words: equal words, equal bytes.
std::string layout_text(const_dnnl_memory_desc_t description, int rank);

}  // namespace rm::cpu::onednn
