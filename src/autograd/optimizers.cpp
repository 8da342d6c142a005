// SGD: Sutskever et al. 2013 as torch has it. Adam: Kingma & Ba 2015, AdamW: Loshchilov & Hutter 2019.
#include "autograd/optimizers.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace rm::autograd {
namespace {

ValueId assign(Builder& b, const Update& u, ValueId state, ValueId value) {
  if (u.apply_if != ir::kNoValue) value = b.where(u.apply_if, value, state);
  return b.op("assign", {state, value});
}

std::vector<ValueId> sgd(Builder& b, const GroupRule& rule, const Update& u) {
  const auto number = [&](int64_t c) { return b.reshape(b.slice(u.numbers, 0, c, c + 1), {}); };
  const ValueId lr = number(0), decay = number(1), momentum = number(2), undamped = number(3);
  ValueId g = rule.maximize ? b.neg(u.gradient) : u.gradient;
  if (rule.weight_decay) g = b.add(g, b.mul(u.parameter, decay));
  std::vector<ValueId> states;
  if (rule.momentum) {
    ValueId moved = b.add(b.mul(u.states[0], momentum), b.mul(g, undamped));
    ValueId buffer = assign(b, u, u.states[0], moved);
    states.push_back(buffer);
    g = rule.nesterov ? b.add(g, b.mul(buffer, momentum)) : buffer;
  }
  ValueId parameter = assign(b, u, u.parameter, b.sub(u.parameter, b.mul(g, lr)));
  states.insert(states.begin(), parameter);
  return states;
}

std::vector<ValueId> adam(Builder& b, const GroupRule& rule, const Update& u) {
  std::vector<ValueId> operands{u.parameter, u.gradient, u.states[0], u.states[1], u.numbers,
                                rule.amsgrad ? u.states[2] : ir::kNoValue, u.apply_if};
  while (operands.back() == ir::kNoValue) operands.pop_back();
  const char* decay = !rule.weight_decay ? "none" : rule.decoupled ? "parameter" : "gradient";
  const std::vector<ValueId> values =
      b.ops("adam", std::move(operands),
            {{"decay", std::string(decay)}, {"maximize", int64_t{rule.maximize ? 1 : 0}}});
  std::vector<ValueId> out{b.op("assign", {u.parameter, values[0]})};
  for (size_t i = 0; i < u.states.size(); ++i) {
    out.push_back(b.op("assign", {u.states[i], values[i + 1]}));
  }
  return out;
}

}  // namespace

std::vector<std::string> columns(Algorithm algorithm) {
  if (algorithm == Algorithm::kSgd) return {"lr", "weight_decay", "momentum", "1-dampening"};
  return {"weight_decay", "1-lr*weight_decay", "1-beta1",   "beta2",
          "1-beta2",      "eps",               "step_size", "sqrt(bias_correction2)"};
}

void sgd_numbers(double lr, double decay, double momentum, double dampening, double* out) {
  const double row[] = {lr, decay, momentum, 1.0 - dampening};
  std::copy(std::begin(row), std::end(row), out);
}

bool adam_numbers(double lr, double decay, double beta1, double beta2, double eps, double count,
                  double* out) {
  const double step = count + 1.0;
  const double first = 1.0 - std::pow(beta1, step), second = 1.0 - std::pow(beta2, step);
  const double size = lr / first, root = std::sqrt(second);
  const double row[] = {decay, 1.0 - lr * decay, 1.0 - beta1, beta2, 1.0 - beta2, eps, size, root};
  std::copy(std::begin(row), std::end(row), out);
  return !(step < 1.0) && first != 0 && !(second < 0);
}

std::vector<std::string> states(const GroupRule& rule) {
  if (rule.algorithm == Algorithm::kSgd) {
    return rule.momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }
  std::vector<std::string> out{"exp_avg", "exp_avg_sq"};
  if (rule.amsgrad) out.emplace_back("max_exp_avg_sq");
  return out;
}

std::vector<ValueId> update(Builder& b, const GroupRule& rule, const Update& what) {
  return rule.algorithm == Algorithm::kSgd ? sgd(b, rule, what) : adam(b, rule, what);
}

}  // namespace rm::autograd
