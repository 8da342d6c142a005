// Turns an operator class into kernel rows, one a level the machine supports, best first.
//
// An operator is a class with
//   static constexpr const char* kOp, *kAlgorithm;
//   static const char* reject(const Problem&);       // nullptr = supported (static string)
//   static double cost_ns(const Problem&);           // at the best level
//   Operator(const Problem&, Isa);                   // throws std::invalid_argument
//   uint64_t workspace_bytes() const;
//   rm_status* launch(const rm_launch&) const;       // allocates nothing on success
// and, where its loops work in blocks,
//   static std::vector<rm_edge> edges(Isa);          // rm_kernel.edges
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/build_id.hpp"
#include "common/problem.hpp"
#include "isa.hpp"
#include "rm/kernel_row.hpp"

namespace rm::cpu {

inline constexpr const char* kNoSuchIsa =
    "this machine (or the option cpu_isa) has no such instruction set";

template <class Op, Isa kIsa>
struct IsaRow {
  using State = Op;
  static const char* why_not(const rm_problem& p, const rm_device_info*) {
    return supported(kIsa) ? Op::reject(Problem(p)) : kNoSuchIsa;
  }
  static double cost_ns(const rm_problem& p, const rm_device_info*) {
    constexpr double kSlower[] = {4.0, 1.0, 0.9};  // against AVX2; only orders the rows
    return Op::cost_ns(Problem(p)) * kSlower[static_cast<int>(kIsa)];
  }
  static Op* make(const rm_problem& p, const rm_device_info*) { return new Op(Problem(p), kIsa); }
  static std::span<const rm_edge> edges()
    requires requires { Op::edges(kIsa); }
  {
    static const std::vector<rm_edge> edges = Op::edges(kIsa);
    return edges;
  }
};

template <class Op, Isa kIsa>
rm_kernel make_row(uint32_t traits = RM_KERNEL_DETERMINISTIC) {
  static const std::string name =
      std::string(Op::kOp) + "_" + Op::kAlgorithm + "_" + isa_name(kIsa);
  if (kIsa == Isa::baseline) traits |= RM_KERNEL_FALLBACK;
  return plugin::kernel_row<IsaRow<Op, kIsa>>(Op::kOp, name, build_id(), traits);
}

/// Rows of an operator whose ISA sources serve every legal problem.
template <class Op>
std::span<const rm_kernel> isa_rows() {
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    make_row<Op, Isa::avx512>(),
    make_row<Op, Isa::avx2>(),
#endif
    make_row<Op, Isa::baseline>()
  };
  return rows;
}

/// Rows of an operator that has no ISA sources (data movement).
template <class Op>
std::span<const rm_kernel> plain_rows() {
  static const std::vector<rm_kernel> rows = {make_row<Op, Isa::baseline>()};
  return rows;
}

}  // namespace rm::cpu

// RM_CPU_TABLE(SoftmaxTable, softmax_table): declares one table of entry points a level;
// RM_CPU_PICK(isa, softmax_table) gives the address of a level's.
#if RM_CPU_X86
#define RM_CPU_TABLE(Type, name) \
  namespace baseline {           \
  extern const Type name;        \
  }                              \
  namespace avx2 {               \
  extern const Type name;        \
  }                              \
  namespace avx512 {             \
  extern const Type name;        \
  }
#define RM_CPU_PICK(isa, name)                     \
  ((isa) == ::rm::cpu::Isa::avx512 ? &avx512::name \
   : (isa) == ::rm::cpu::Isa::avx2 ? &avx2::name   \
                                   : &baseline::name)
#else
#define RM_CPU_TABLE(Type, name) \
  namespace baseline {           \
  extern const Type name;        \
  }
#define RM_CPU_PICK(isa, name) ((void)(isa), &baseline::name)
#endif
