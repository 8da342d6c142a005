// Updates of one parameter as IR, with the formulas of torch.optim's single-tensor loops.
//
// Numbers that schedules change (learning rate, decay, bias corrections) are elements of a row of
// the step's input `hyper`; what changes the formula is a flag. State and parameter are updated by
// `assign`, whose result is what later nodes read.
#pragma once

#include <string>
#include <vector>

#include "autograd/builder.hpp"

namespace rm::autograd {

enum class Algorithm { kSgd, kAdam };

/// One parameter group: the columns of its row of `hyper` are those of `columns(algorithm)`.
struct GroupRule {
  Algorithm algorithm = Algorithm::kSgd;
  bool momentum = false;      // SGD: there is a buffer
  bool nesterov = false;      // SGD
  bool weight_decay = false;  // the decay is not 0
  bool decoupled = false;     // Adam: the decay shrinks the parameter itself (AdamW)
  bool amsgrad = false;       // Adam
  bool maximize = false;
};

/// Names of the numbers that a row of `hyper` holds, in order.
std::vector<std::string> columns(Algorithm algorithm);
/// That row for the step behind `count` steps, as torch.optim computes it; `out` has room for it.
void sgd_numbers(double lr, double decay, double momentum, double dampening, double* out);
/// False: torch.optim cannot correct the bias and raises, as with a first beta of 1 or behind -1 steps.
bool adam_numbers(double lr, double decay, double beta1, double beta2, double eps, double count,
                  double* out);
/// Names of the state tensors of one parameter, in order; each has the parameter's type.
std::vector<std::string> states(const GroupRule& rule);

struct Update {
  ValueId parameter = ir::kNoValue, gradient = ir::kNoValue;
  std::vector<ValueId> states;
  ValueId numbers = ir::kNoValue;   // [columns], of the parameter's element type
  ValueId apply_if = ir::kNoValue;  // bool []: where it is false, all stay what they were
};

/// Appends the update; returns the new parameter and states, each an `assign`.
std::vector<ValueId> update(Builder& b, const GroupRule& rule, const Update& what);

}  // namespace rm::autograd
