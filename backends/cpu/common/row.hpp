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
#include "rm/plugin.hpp"

namespace rm::cpu {

template <class Op, Isa kIsa>
struct RowEntries {
  static Op* op(rm_kernel_state* s) { return reinterpret_cast<Op*>(s); }
  static const Op* op(const rm_kernel_state* s) { return reinterpret_cast<const Op*>(s); }

  static int supports(const rm_problem* p, const rm_device_info*, rm_str* why_not) {
    const char* why = nullptr;
    if (!supported(kIsa)) {
      why = "this machine (or the option cpu_isa) has no such instruction set";
    } else {
      // reject() reads operands through throwing accessors: a malformed problem is a no.
      try {
        why = Op::reject(Problem(*p));
      } catch (const std::exception&) {
        why = "the problem does not match the operator's schema";
      }
    }
    if (why && why_not) *why_not = plugin::str(why);
    return why == nullptr;
  }
  static double cost_ns(const rm_problem* p, const rm_device_info*, uint32_t) {
    constexpr double kSlower[] = {4.0, 1.0, 0.9};  // against AVX2; only orders the rows
    try {
      return Op::cost_ns(Problem(*p)) * kSlower[static_cast<int>(kIsa)];
    } catch (const std::exception&) {
      return 1e18;
    }
  }
  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard(
        [&] { *out = reinterpret_cast<rm_kernel_state*>(new Op(Problem(*p), kIsa)); });
  }
  static void release(rm_kernel_state* s) { delete op(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return op(s)->workspace_bytes(); }
  static rm_status* launch(const rm_launch* l) {
    rm_status* status = nullptr;
    rm_status* thrown = plugin::guard([&] { status = op(l->state)->launch(*l); });
    return thrown ? thrown : status;
  }
};

template <class Op, Isa kIsa>
rm_kernel make_row(uint32_t traits = RM_KERNEL_DETERMINISTIC) {
  static const std::string name =
      std::string(Op::kOp) + "_" + Op::kAlgorithm + "_" + isa_name(kIsa);
  using Entries = RowEntries<Op, kIsa>;
  rm_kernel row{};
  row.struct_size = sizeof(row);
  row.op = plugin::str(Op::kOp);
  row.name = plugin::str(name);
  row.digest = plugin::str(build_id());
  if (kIsa == Isa::baseline) traits |= RM_KERNEL_FALLBACK;
  row.traits = traits;
  row.num_configs = 1;
  row.supports = Entries::supports;
  row.cost_ns = Entries::cost_ns;
  row.prepare = Entries::prepare;
  row.release = Entries::release;
  row.workspace = Entries::workspace;
  row.launch = Entries::launch;
  if constexpr (requires { Op::edges(kIsa); }) {
    static const std::vector<rm_edge> edges = Op::edges(kIsa);
    row.edges = edges.data();
    row.num_edges = edges.size();
  }
  return row;
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
