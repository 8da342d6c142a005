// SGD: Sutskever et al. 2013 as torch has it. Adam: Kingma & Ba 2015, AdamW: Loshchilov & Hutter 2019.
#include "autograd/optimizers.hpp"

namespace rm::autograd {
namespace {

ValueId assign(Builder& b, const Update& u, ValueId state, ValueId value) {
  if (u.apply_if != ir::kNoValue) value = b.where(u.apply_if, value, state);
  return b.op("assign", {state, value});
}

std::vector<ValueId> sgd(Builder& b, const GroupRule& rule, const Update& u) {
  const ValueId lr = u.hyper[0], decay = u.hyper[1], momentum = u.hyper[2], undamped = u.hyper[3];
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
  const ValueId decay = u.hyper[0], keep = u.hyper[1], new1 = u.hyper[2], old2 = u.hyper[3],
                new2 = u.hyper[4], eps = u.hyper[5], step = u.hyper[6], root = u.hyper[7];
  ValueId g = rule.maximize ? b.neg(u.gradient) : u.gradient, p = u.parameter;
  if (rule.weight_decay && rule.decoupled) p = b.mul(p, keep);
  if (rule.weight_decay && !rule.decoupled) g = b.add(g, b.mul(p, decay));
  ValueId m = assign(b, u, u.states[0], b.add(u.states[0], b.mul(b.sub(g, u.states[0]), new1)));
  ValueId v = assign(b, u, u.states[1], b.add(b.mul(u.states[1], old2), b.mul(b.mul(g, g), new2)));
  std::vector<ValueId> out{ir::kNoValue, m, v};
  ValueId second = v;
  if (rule.amsgrad) {
    second = assign(b, u, u.states[2], b.op("maximum", {u.states[2], v}));
    out.push_back(second);
  }
  ValueId denominator = b.add(b.div(b.op("sqrt", {second}), root), eps);
  out[0] = assign(b, u, u.parameter, b.sub(p, b.mul(b.div(m, denominator), step)));
  return out;
}

}  // namespace

std::vector<std::string> columns(Algorithm algorithm) {
  if (algorithm == Algorithm::kSgd) return {"lr", "weight_decay", "momentum", "1-dampening"};
  return {"weight_decay", "1-lr*weight_decay", "1-beta1",   "beta2",
          "1-beta2",      "eps",               "step_size", "sqrt(bias_correction2)"};
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
