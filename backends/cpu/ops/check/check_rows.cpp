// Rows of check: the one kernel whose work is to refuse.
#include "ops/check/rows.hpp"

#include <string>

#include "common/row.hpp"

namespace rm::cpu {
namespace {

class Check {
 public:
  static constexpr const char* kOp = "check";
  static constexpr const char* kAlgorithm = "plain";

  static const char* reject(const Problem& p) {
    const bool scalar = p.input(0).dtype == DType::boolean && p.input(0).numel() == 1;
    return scalar ? nullptr : "a condition that is not one bool";
  }
  static double cost_ns(const Problem&) { return 10; }

  Check(const Problem& p, Isa) : message_(p.attr_string("message", "")) {}
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const bool holds = *static_cast<const uint8_t*>(l.inputs[0]) != 0;
    if (!holds) {
      return plugin::fail(RM_OUT_OF_RANGE, "[check] expected what the forward checks to hold (" +
                                               message_ + "), got values for which it does not");
    }
    *static_cast<uint8_t*>(l.outputs[0]) = 1;
    return nullptr;
  }

 private:
  std::string message_;
};

}  // namespace

std::span<const rm_kernel> check_rows() { return plain_rows<Check>(); }

}  // namespace rm::cpu
