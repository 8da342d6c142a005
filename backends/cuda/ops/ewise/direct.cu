// Launches of the one-instruction kernels: a template for each opcode and float dtype.
#include "ewise/kernels/ewise_direct_sm80.cuh"
#include "ewise/plan.hpp"

namespace rm::cuda_ops {
namespace {

template <class T, int Op, int Arity>
Status launch(const Ewise& p, Stream stream) {
  const auto& in = p.program.code[0];
  const auto* a = static_cast<const T*>(p.operands[in.a].data);
  const T* b = Arity == 2 ? static_cast<const T*>(p.operands[in.b].data) : nullptr;
  const std::int64_t n = numel(p.y), vectors = n / kVec<T>;
  const auto blocks = static_cast<unsigned>(
      std::max<std::int64_t>(1, ceil_div(vectors, 256 * (Arity == 1 ? 4 : 2))));
  return launch_overlapped("ewise", ewise_direct<T, Op, Arity>, blocks, 256, 0, stream, a, b,
                           static_cast<T*>(p.y.data), vectors, n % kVec<T>);
}

template <class T>
Status launch_opcode(const Ewise& p, Stream stream) {
  switch (p.program.code[0].opcode) {
#define RM_CASE(id, ...) \
  case k##id:            \
    return launch<T, k##id, 1>(p, stream);
    RM_EWISE_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(id, ...) \
  case k##id:            \
    return launch<T, k##id, 2>(p, stream);
    RM_EWISE_BINARY(RM_CASE)
#undef RM_CASE
    default:
      return {};  // direct_why_not has refused it
  }
}

}  // namespace

Status launch_direct(const Ewise& p, Workspace, Stream stream) {
  return dispatch_float(p.y.dtype, [&](auto type) {
    return launch_opcode<typename decltype(type)::type>(p, stream);
  });
}

}  // namespace rm::cuda_ops
