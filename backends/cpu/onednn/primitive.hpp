// A primitive of oneDNN, ready to be launched by several threads at once.
#pragma once

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "onednn/api.hpp"

namespace rm::cpu::onednn {

/// Names in errors which operator's row asks ("gemm", "conv").
struct Caller {
  const char* op;

  /// Throws std::runtime_error unless the library accepted `what`.
  void require(dnnl_status_t status, const char* what) const;
};

/// A memory of `dims` with `strides` (elements), or in the layout that a primitive prefers.
Description describe(Caller caller, std::span<const int64_t> dims, dnnl_data_type_t type,
                     std::span<const int64_t> strides, const char* what);
Description describe_any_layout(Caller caller, std::span<const int64_t> dims,
                                dnnl_data_type_t type, const char* what);

/// Attributes with these post-operations and a scratchpad that the caller brings.
Attributes attributes_with(Caller caller, const PostOps& ops);
PostOps no_post_ops(Caller caller);

/// Copies `src`, laid out as `from`, to `dst`, laid out as `to`.
void reorder(Caller caller, const_dnnl_memory_desc_t from, const void* src,
             const_dnnl_memory_desc_t to, void* dst);

/// Memory objects carry the data pointers of one launch. So concurrent launches need sets of their
/// own; they are pooled, and a launch in steady state creates none.
class Primitive {
 public:
  struct Operand {
    int argument;                          // DNNL_ARG_*
    const_dnnl_memory_desc_t description;  // lives as long as the primitive
  };

  Primitive(Caller caller, PrimitiveDescription description);

  /// The layouts the library chose; they live as long as the primitive.
  const_dnnl_memory_desc_t weights() const { return query(dnnl_query_weights_md); }
  const_dnnl_memory_desc_t scratchpad() const { return query(dnnl_query_scratchpad_md); }

  /// Which data `launch` takes, in this order. Creates the first set of memory objects.
  void set_operands(std::vector<Operand> operands);

  /// Throws std::runtime_error when the library refuses. Any thread may call it.
  void launch(std::span<const void* const> data) const;

 private:
  struct Launchable {
    Stream stream;
    std::vector<Memory> memories;
    std::vector<dnnl_exec_arg_t> arguments;
  };

  const_dnnl_memory_desc_t query(dnnl_query_t what) const;
  Launchable make() const;
  Launchable borrow() const;

  Caller caller_;
  PrimitiveDescription description_;
  Executable executable_;
  std::vector<Operand> operands_;
  mutable std::mutex mutex_;
  mutable std::vector<Launchable> free_;
};

}  // namespace rm::cpu::onednn
