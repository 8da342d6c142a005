// Kernel rows of an operator whose problem is decoded once, and whose rows differ in more than the
// instruction set: libraries beside kernels of our own.
//
// An operator is a class with
//   static constexpr const char* kOp;
//   static Problem decode(const rm_problem&);        // throws where operands are outside the schema
//   template <class Of> static double cost_ns(const Problem&);
// and one of its rows a class `Of` with
//   using Kernel = ...;                              // a prepared problem, as rm/kernel_row.hpp says
//   static const char* reject(const Problem&);       // nullptr = supported (static string)
//   static Kernel* make(Problem);                    // of a problem that it does not reject
// and, where its loops work in blocks,
//   static std::vector<rm_edge> edges();
#pragma once

#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/build_id.hpp"
#include "rm/kernel_row.hpp"

namespace rm::cpu {

template <class Operator, class Of>
struct DecodedRow {
  using State = typename Of::Kernel;
  static const char* why_not(const rm_problem& p, const rm_device_info*) {
    return Of::reject(Operator::decode(p));
  }
  static double cost_ns(const rm_problem& p, const rm_device_info*) {
    return Operator::template cost_ns<Of>(Operator::decode(p));
  }
  static State* make(const rm_problem& p, const rm_device_info*) {
    auto problem = Operator::decode(p);
    if (const char* why = Of::reject(problem)) throw std::invalid_argument(why);
    return Of::make(std::move(problem));
  }
  static std::span<const rm_edge> edges()
    requires requires { Of::edges(); }
  {
    static const std::vector<rm_edge> edges = Of::edges();
    return edges;
  }
};

template <class Operator, class Of>
rm_kernel make_decoded_row(const char* name, uint32_t traits = RM_KERNEL_DETERMINISTIC) {
  return plugin::kernel_row<DecodedRow<Operator, Of>>(Operator::kOp, name, build_id(), traits);
}

}  // namespace rm::cpu
