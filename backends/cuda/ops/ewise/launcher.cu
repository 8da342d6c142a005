// The table of ewise and the launches of its program kernels.
#include "_shim/alias_shim.hpp"
#include "ewise/kernels/ewise_chain_sm80.cuh"
#include "ewise/kernels/ewise_interp_any.cuh"
#include "ewise/plan.hpp"

namespace rm::cuda_ops {
namespace {

double bytes_of(const Ewise& p) {
  double bytes = static_cast<double>(numel(p.y)) * size_of(p.y.dtype);
  for (const Tensor& t : p.operands) {
    double n = size_of(t.dtype);
    for (int d = 0; d < t.rank; ++d) n *= t.stride[d] == 0 ? 1.0 : static_cast<double>(t.shape[d]);
    bytes += n;
  }
  return bytes;
}

/// A chain's thread computes its 16 values of a long function one after the other.
double long_functions_us(const Ewise& p) {
  constexpr double kEach = 4;
  double us = 0;
  for (const EwiseInstruction& in : p.program.code) {
    switch (in.opcode) {
#define RM_CASE(name) case name:
      RM_EWISE_RARE_UNARY(RM_CASE)
      RM_EWISE_RARE_BINARY(RM_CASE)
#undef RM_CASE
      us += kEach;
      break;
      default:
        break;
    }
  }
  return us;
}

const char* chain_why_not(const Ewise& p) {
  EwiseChainArgs args;
  int vector = 0, bytes = 0;
  return chain_args(p, &args, &vector, &bytes);
}

Status launch_chain(const Ewise& p, Workspace, Stream stream) {
  EwiseChainArgs args;
  int vector = 0, bytes = 0;
  if (const char* why = chain_args(p, &args, &vector, &bytes))
    return unsupported(std::string("[ewise] ") + why);
  auto* kernel = vector == 8 ? ewise_chain<8> : ewise_chain<4>;
  if (bytes > 48 * 1024) {
    if (Status s = allow_shared_memory("ewise", kernel, bytes); !s) return s;
  }
  const auto blocks =
      static_cast<unsigned>(ceil_div(args.vectors, kChainThreads * (kChainValues / vector)));
  return launch_overlapped("ewise", kernel, blocks, kChainThreads, static_cast<std::size_t>(bytes),
                           stream, args);
}

Status launch_interp(const Ewise& p, Workspace, Stream stream) {
  const EwiseArgs args = interp_args(p);
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(ceil_div(args.total, 128), 1 << 20));
  return launch_overlapped("ewise", ewise_interp, blocks, 128, 0, stream, args);
}

constexpr KernelRow<Ewise> kRows[] = {
    {"ewise_direct_sm80", "one instruction over dense tensors of one float dtype", direct_why_not,
     [](const Ewise& p) { return move_us(bytes_of(p)); }, launch_direct},
    {"ewise_fused_sm80", "chains over at most three operands: dense, rows or single values",
     fused_why_not, [](const Ewise& p) { return 0.5 + 1.02 * move_us(bytes_of(p)); }, launch_fused},
    {"ewise_chain_sm80", "class f32 programs, dense or broadcast inner axis, multiple of 8",
     chain_why_not,
     [](const Ewise& p) { return 1 + 1.1 * move_us(bytes_of(p)) + long_functions_us(p); },
     launch_chain},
    {"ewise_interp_any", "any program", [](const Ewise&) -> const char* { return nullptr; },
     [](const Ewise& p) { return 3 + 10 * (move_us(bytes_of(p)) - move_us(0)); }, launch_interp},
};

}  // namespace

std::span<const KernelRow<Ewise>> ewise_rows() { return kRows; }

Status legal(const Ewise& p) {
  if (Status s = check_ewise(p); !s) return s;
  std::vector<Operand> operands;
  operands.reserve(p.operands.size());
  for (const Tensor& t : p.operands) operands.push_back({"an operand", &t, true});
  const Operand result[] = {{"y", &p.y, true}};
  return check_memory("ewise", result, operands);
}

Status ewise(const Ewise& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Ewise>* row = nullptr;
  if (Status s = select_row<Ewise>("ewise", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
