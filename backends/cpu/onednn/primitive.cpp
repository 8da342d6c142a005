#include "onednn/primitive.hpp"

#include <stdexcept>

namespace rm::cpu::onednn {
namespace {

Memory memory(Caller caller, const_dnnl_memory_desc_t description, const void* data) {
  dnnl_memory_t made = nullptr;
  caller.require(
      api().memory_create(&made, description, api().engine, const_cast<void*>(data)), "an operand");
  return Memory(made);
}

Stream stream(Caller caller) {
  dnnl_stream_t made = nullptr;
  caller.require(api().stream_create(&made, api().engine, dnnl_stream_in_order), "a stream");
  return Stream(made);
}

Executable executable(Caller caller, const_dnnl_primitive_desc_t description) {
  dnnl_primitive_t made = nullptr;
  caller.require(api().primitive_create(&made, description), "this problem");
  return Executable(made);
}

}  // namespace

void Caller::require(dnnl_status_t status, const char* what) const {
  if (status == dnnl_success) return;
  const std::string row(op);
  throw std::runtime_error("[" + row + "] expected oneDNN to accept " + what + ", got status " +
                           std::to_string(status) + "; try another " + row + " row");
}

Description describe(Caller caller, std::span<const int64_t> dims, dnnl_data_type_t type,
                     std::span<const int64_t> strides, const char* what) {
  dnnl_memory_desc_t made = nullptr;
  caller.require(api().memory_desc_create_with_strides(&made, static_cast<int>(dims.size()),
                                                       dims.data(), type, strides.data()),
                 what);
  return Description(made);
}

Description describe_any_layout(Caller caller, std::span<const int64_t> dims,
                                dnnl_data_type_t type, const char* what) {
  dnnl_memory_desc_t made = nullptr;
  caller.require(api().memory_desc_create_with_tag(&made, static_cast<int>(dims.size()),
                                                   dims.data(), type, dnnl_format_tag_any),
                 what);
  return Description(made);
}

PostOps no_post_ops(Caller caller) {
  dnnl_post_ops_t made = nullptr;
  caller.require(api().post_ops_create(&made), "post-operations");
  return PostOps(made);
}

Attributes attributes_with(Caller caller, const PostOps& ops) {
  dnnl_primitive_attr_t made = nullptr;
  caller.require(api().primitive_attr_create(&made), "attributes");
  Attributes attributes(made);
  caller.require(api().primitive_attr_set_post_ops(made, ops.get()), "post-operations");
  caller.require(api().primitive_attr_set_scratchpad_mode(made, dnnl_scratchpad_mode_user),
                 "a scratchpad");
  return attributes;
}

void reorder(Caller caller, const_dnnl_memory_desc_t from, const void* src,
             const_dnnl_memory_desc_t to, void* dst) {
  const Api& a = api();
  dnnl_primitive_desc_t made = nullptr;
  caller.require(a.reorder_primitive_desc_create(&made, from, a.engine, to, a.engine, nullptr),
                 "a reorder of the weight");
  const PrimitiveDescription description(made);
  const Executable program = executable(caller, made);
  const Memory source = memory(caller, from, src), result = memory(caller, to, dst);
  const Stream queue = stream(caller);
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_FROM, source.get()}, {DNNL_ARG_TO, result.get()}};
  caller.require(a.primitive_execute(program.get(), queue.get(), 2, arguments),
                 "a reorder of the weight");
}

Primitive::Primitive(Caller caller, PrimitiveDescription description)
    : caller_(caller),
      description_(std::move(description)),
      executable_(executable(caller, description_.get())) {}

const_dnnl_memory_desc_t Primitive::query(dnnl_query_t what) const {
  return api().primitive_desc_query_md(description_.get(), what, 0);
}

void Primitive::set_operands(std::vector<Operand> operands) {
  operands_ = std::move(operands);
  free_.push_back(make());
}

Primitive::Launchable Primitive::make() const {
  Launchable made;
  made.stream = stream(caller_);
  for (const Operand& operand : operands_) {
    made.memories.push_back(memory(caller_, operand.description, nullptr));  // launch() sets it
    made.arguments.push_back({operand.argument, made.memories.back().get()});
  }
  return made;
}

Primitive::Launchable Primitive::borrow() const {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Launchable found = std::move(free_.back());
      free_.pop_back();
      return found;
    }
  }
  return make();
}

void Primitive::launch(std::span<const void* const> data) const {
  if (data.size() != operands_.size()) throw std::logic_error("[onednn] one pointer an operand");
  Launchable borrowed = borrow();
  dnnl_status_t status = dnnl_success;
  for (size_t i = 0; i < data.size() && status == dnnl_success; ++i) {
    status = api().memory_set_data_handle(borrowed.memories[i].get(), const_cast<void*>(data[i]));
  }
  if (status == dnnl_success) {
    status = api().primitive_execute(executable_.get(), borrowed.stream.get(),
                                     static_cast<int>(borrowed.arguments.size()),
                                     borrowed.arguments.data());
  }
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(borrowed));
  }
  caller_.require(status, "a launch");
}

}  // namespace rm::cpu::onednn
