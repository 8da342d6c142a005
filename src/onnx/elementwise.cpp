// Element-wise operators and casts.
#include <cmath>
#include <limits>

#include "onnx/unsigned.hpp"

namespace rm::onnx {
namespace {

Converter unary(std::string name) {
  return [name](Importer& m) { m.out(m.op(name, {m.in(0)})); };
}

Dim arithmetic(const std::string& name, const Dim& a, const Dim& b) {
  if (name == "add") return a + b;
  if (name == "sub") return a - b;
  if (name == "mul") return a * b;
  return Dim::floordiv(a, b);
}

// Integers computed from shapes stay sizes.
bool on_sizes(Importer& m, const std::string& name) {
  std::optional<Dims> a = m.sizes(0), b = m.sizes(1);
  if (!a || !b || a->empty() || b->empty()) return false;
  const size_t n = std::max(a->size(), b->size());
  if ((a->size() != n && a->size() != 1) || (b->size() != n && b->size() != 1)) return false;
  Dims made;
  for (size_t k = 0; k < n; ++k) {
    const Dim &x = (*a)[a->size() == 1 ? 0 : k], &y = (*b)[b->size() == 1 ? 0 : k];
    if (name == "div" && (!y.is_static() || y.value() <= 0 || x.value_or(0) < 0)) return false;
    made.push_back(arithmetic(name, x, y));
  }
  m.out_sizes(std::move(made), m.is_scalar(0) && m.is_scalar(1));
  return true;
}

// Integers divide towards zero.
ValueId divided(Importer& m, ValueId a, ValueId b) {
  if (ir::is_floating(m.type(a).dtype)) return m.op("div", {a, b});
  if (is_u64(m, a)) return quotient_u64(m, a, b);
  ValueId q = m.op("floor_div", {m.op("abs", {a}), m.op("abs", {b})});
  return m.op("mul", {q, m.op("mul", {m.op("sign", {a}), m.op("sign", {b})})});
}

Converter binary(std::string name) {
  return [name](Importer& m) {
    if (name == "add" || name == "sub" || name == "mul" || name == "div") {
      if (on_sizes(m, name)) return;
    }
    ValueId a = m.in(0), b = m.in(1);
    if (name == "pow") b = m.cast(b, m.type(a).dtype);
    const bool orders = name == "gt" || name == "ge" || name == "lt" || name == "le";
    if (orders && is_u64(m, a)) return m.out(compared_u64(m, name, a, b));
    m.out(name == "div" ? divided(m, a, b) : m.op(name, {a, b}));
  };
}

Converter folded_over(std::string name) {
  return [name](Importer& m) {
    ValueId y = m.in(0);
    for (size_t k = 1; k < m.node().inputs.size(); ++k) {
      const bool orders = name != "add" && is_u64(m, y);
      y = orders ? extreme_u64(m, name, y, m.in(k)) : m.op(name, {y, m.in(k)});
    }
    if (m.node().op == "Mean") {
      y = m.op("div", {y, m.number(y, static_cast<double>(m.node().inputs.size()))});
    }
    m.out(y);
  };
}

void convert_equal(Importer& m) {
  std::optional<Dims> a = m.sizes(0), b = m.sizes(1);
  if (a && b && a->size() == b->size() && !m.is_scalar(0) && !m.is_scalar(1)) {
    std::string bits;
    for (size_t k = 0; k < a->size(); ++k) {  // a symbolic size is never negative
      const Dim &x = (*a)[k], &y = (*b)[k];
      if (x == y)
        bits.push_back(1);
      else if ((x.is_static() && (y.is_static() || x.value() < 0)) ||
               (y.is_static() && y.value() < 0))
        bits.push_back(0);
    }
    if (bits.size() == a->size()) {
      const auto n = static_cast<int64_t>(bits.size());
      m.out(m.graph().add_literal({ir::DType::kBool, {Dim(n)}}, bits));
      return;
    }
  }
  m.out(m.op("eq", {m.in(0), m.in(1)}));
}

void convert_where(Importer& m) {
  ValueId c = m.in(0);
  const ir::Value condition = m.graph().value(c);
  std::optional<Dims> a = m.sizes(1), b = m.sizes(2);
  if (condition.kind == ir::ValueKind::kLiteral && a && b && a->size() == b->size() &&
      condition.type.rank() == 1 && condition.literal.size() == a->size()) {
    Dims made;
    for (size_t k = 0; k < a->size(); ++k) made.push_back(condition.literal[k] ? (*a)[k] : (*b)[k]);
    m.out_sizes(std::move(made), false);
    return;
  }
  m.out(m.op("where", {c, m.in(1), m.in(2)}));
}

void convert_cast(Importer& m) {
  const int64_t to = m.node().op == "CastLike" ? 0 : m.i("to", 0);
  if (to == 7 && m.sizes(0)) {
    m.out_sizes(*m.sizes(0), m.is_scalar(0));
    return;
  }
  m.out(m.cast(m.in(0), to == 0 ? m.type(m.in(1)).dtype : dtype_of(to, "Cast")));
}

void convert_clip(Importer& m) {
  ValueId y = m.in(0);
  if (m.opset() < 11) {
    if (m.attribute("min")) y = m.op("maximum", {y, m.number(y, m.f("min", 0))});
    if (m.attribute("max")) y = m.op("minimum", {y, m.number(y, m.f("max", 0))});
  } else {
    if (m.has(1)) y = m.op("maximum", {y, m.in(1)});
    if (m.has(2)) y = m.op("minimum", {y, m.in(2)});
  }
  m.out(y);
}

ValueId clamped_line(Importer& m, ValueId x, double alpha, double beta) {
  ValueId y = m.op("add", {m.op("mul", {x, m.number(x, alpha)}), m.number(x, beta)});
  return m.op("minimum", {m.op("maximum", {y, m.number(x, 0)}), m.number(x, 1)});
}

void convert_elu(Importer& m) {
  const bool is_selu = m.node().op == "Selu";
  const double alpha = m.f("alpha", is_selu ? 1.67326319217681884765625 : 1.0);
  ValueId x = m.in(0);
  ValueId below = m.op("mul", {m.op("expm1", {x}), m.number(x, alpha)});
  ValueId y = m.op("where", {m.op("gt", {x, m.number(x, 0)}), x, below});
  if (is_selu) y = m.op("mul", {y, m.number(x, m.f("gamma", 1.05070102214813232421875))});
  m.out(y);
}

void convert_leaky(Importer& m) {
  ValueId x = m.in(0);
  ValueId slope = m.node().op == "PRelu" ? m.in(1) : m.number(x, m.f("alpha", 0.01));
  m.out(m.op("where", {m.op("lt", {x, m.number(x, 0)}), m.op("mul", {x, slope}), x}));
}

// With fmod=1 the result has the sign of the dividend.
void convert_mod(Importer& m) {
  ValueId a = m.in(0), b = m.in(1);
  if (is_u64(m, a)) return m.out(remainder_u64(m, a, b));
  if (m.i("fmod", 0) == 0) return m.out(m.op("remainder", {a, b}));
  ValueId size = m.op("remainder", {m.op("abs", {a}), m.op("abs", {b})});
  m.out(m.op("mul", {size, m.op("sign", {a})}));
}

// Shifts are products and quotients with powers of two; quotients round down as shifts do.
void convert_shift(Importer& m) {
  ValueId by = m.in(1);
  const std::string direction = m.s("direction", "");
  if (direction != "LEFT" && direction != "RIGHT") m.refuse("LEFT or RIGHT", direction);
  if (is_u64(m, by)) return m.out(shifted_u64(m, m.in(0), by, direction == "LEFT"));
  if (direction == "LEFT") {
    return m.out(m.op("mul", {m.in(0), m.op("pow", {m.number(by, 2), by})}));
  }
  // 2^7 is no i8, so the quotient is of a wider type; 2^62 leaves nothing but the sign.
  const ir::DType wide = ir::DType::kI64, dtype = m.dtype(by);
  ValueId w = m.cast(by, wide);
  // By ONNX a shift below zero is one past the width.
  w = m.op("where", {m.op("lt", {w, m.number(w, 0)}), m.number(w, 62), w});
  w = m.op("maximum", {m.op("minimum", {w, m.number(w, 62)}), m.number(w, 0)});
  ValueId y = m.op("floor_div", {m.cast(m.in(0), wide), m.op("pow", {m.number(w, 2), w})});
  m.out(m.cast(y, dtype));
}

void convert_is_inf(Importer& m) {
  ValueId x = m.in(0);
  const double inf = std::numeric_limits<double>::infinity();
  const bool up = m.i("detect_positive", 1) != 0, down = m.i("detect_negative", 1) != 0;
  if (up && down) return m.out(m.op("eq", {m.op("abs", {x}), m.number(x, inf)}));
  if (!up && !down) return m.out(m.op("ne", {m.op("eq", {x, x}), m.op("eq", {x, x})}));
  m.out(m.op("eq", {x, m.number(x, up ? inf : -inf)}));
}

void convert_celu(Importer& m) {
  ValueId x = m.in(0), zero = m.number(x, 0);
  const double alpha = m.f("alpha", 1);
  ValueId below = m.op("expm1", {m.op("div", {m.op("minimum", {x, zero}), m.number(x, alpha)})});
  m.out(m.op("add", {m.op("maximum", {x, zero}), m.op("mul", {below, m.number(x, alpha)})}));
}

void convert_shrink(Importer& m) {
  ValueId x = m.in(0), zero = m.number(x, 0);
  const double lambd = m.f("lambd", 0.5), bias = m.f("bias", 0);
  ValueId up = m.op(
      "where", {m.op("gt", {x, m.number(x, lambd)}), m.op("sub", {x, m.number(x, bias)}), zero});
  m.out(m.op("where",
             {m.op("lt", {x, m.number(x, -lambd)}), m.op("add", {x, m.number(x, bias)}), up}));
}

// (e^x ± e^-x) / 2; sinh by expm1, which keeps the digits of small x.
Converter hyperbolic(bool is_sinh) {
  return [is_sinh](Importer& m) {
    ValueId x = m.in(0), half = m.number(x, 0.5);
    if (!is_sinh)
      return m.out(
          m.op("mul", {m.op("add", {m.op("exp", {x}), m.op("exp", {m.op("neg", {x})})}), half}));
    m.out(
        m.op("mul", {m.op("sub", {m.op("expm1", {x}), m.op("expm1", {m.op("neg", {x})})}), half}));
  };
}

void convert_asinh(Importer& m) {  // sign(x) log1p(|x| + x²/(1 + sqrt(x² + 1)))
  ValueId x = m.in(0), a = m.op("abs", {x}), one = m.number(x, 1), square = m.op("mul", {x, x});
  ValueId root = m.op("sqrt", {m.op("add", {square, one})});
  ValueId inner = m.op("add", {a, m.op("div", {square, m.op("add", {root, one})})});
  m.out(m.op("mul", {m.op("sign", {x}), m.op("log1p", {inner})}));
}

void convert_acosh(Importer& m) {  // log1p(t + sqrt(2t + t²)) for t = x - 1
  ValueId x = m.in(0), t = m.op("sub", {x, m.number(x, 1)});
  ValueId root = m.op("sqrt", {m.op("mul", {t, m.op("add", {t, m.number(x, 2)})})});
  m.out(m.op("log1p", {m.op("add", {t, root})}));
}

void convert_atanh(Importer& m) {  // (log1p(x) - log1p(-x)) / 2
  ValueId x = m.in(0);
  ValueId d = m.op("sub", {m.op("log1p", {x}), m.op("log1p", {m.op("neg", {x})})});
  m.out(m.op("mul", {d, m.number(x, 0.5)}));
}

// Reduced to |t| <= tan(pi/8) by atan(a) = pi/2 + atan(-1/a) and pi/4 + atan((a-1)/(a+1)); the
// Taylor series to t^29, whose rest is below 1e-13 there.
ValueId arc_tangent(Importer& m, ValueId x) {
  const auto number = [&](double v) { return m.number(x, v); };
  ValueId a = m.op("abs", {x}), one = number(1);
  ValueId is_near = m.op("le", {a, number(std::tan(M_PI / 8))});
  ValueId is_far = m.op("gt", {a, number(std::tan(3 * M_PI / 8))});
  ValueId middle = m.op("div", {m.op("sub", {a, one}), m.op("add", {a, one})});
  ValueId t = m.op("where", {is_far, m.op("div", {number(-1), a}), middle});
  t = m.op("where", {is_near, a, t});
  ValueId start = m.op("where", {is_far, number(M_PI / 2), number(M_PI / 4)});
  start = m.op("where", {is_near, number(0), start});
  ValueId square = m.op("mul", {t, t}), total = number(1.0 / 29);
  for (int n = 27; n > 0; n -= 2) {
    total = m.op("sub", {number(1.0 / n), m.op("mul", {square, total})});
  }
  ValueId y = m.op("add", {start, m.op("mul", {t, total})});
  return m.op("where", {m.op("lt", {x, number(0)}), m.op("neg", {y}), y});
}

// atan(x / sqrt(1 - x²)), and 2 atan(sqrt((1 - x) / (1 + x))).
ValueId arc_sine(Importer& m, ValueId x) {
  ValueId one = m.number(x, 1);
  ValueId rest = m.op("mul", {m.op("sub", {one, x}), m.op("add", {one, x})});
  return arc_tangent(m, m.op("div", {x, m.op("sqrt", {rest})}));
}

ValueId arc_cosine(Importer& m, ValueId x) {
  ValueId one = m.number(x, 1);
  ValueId ratio = m.op("div", {m.op("sub", {one, x}), m.op("add", {one, x})});
  return m.op("mul", {m.number(x, 2), arc_tangent(m, m.op("sqrt", {ratio}))});
}

// In f32 where x is of half precision.
Converter arc(ValueId (*function)(Importer&, ValueId)) {
  return [function](Importer& m) {
    const ir::DType dtype = m.dtype(m.in(0));
    const bool is_half = dtype == ir::DType::kF16 || dtype == ir::DType::kBF16;
    m.out(m.cast(function(m, is_half ? m.cast(m.in(0), ir::DType::kF32) : m.in(0)), dtype));
  };
}

void convert_bitcast(Importer& m) {
  ValueId x = m.in(0);
  const ir::DType to = dtype_of(m.i("to", 0), "BitCast");
  if (m.dtype(x) == to) return m.out(x);
  if (ir::size_bytes(to) != ir::size_bytes(m.dtype(x)) || to == ir::DType::kBool) {
    m.refuse("a type of as many bytes, not bool", std::string(ir::name(to)));
  }
  m.out(m.typed("bitcast", {x}, {}, {to, m.dims(x)}));
}

}  // namespace

void add_elementwise(Table* table) {
  Table& t = *table;
  for (auto [theirs, ours] :
       std::initializer_list<std::pair<const char*, const char*>>{{"Neg", "neg"},
                                                                  {"Abs", "abs"},
                                                                  {"Exp", "exp"},
                                                                  {"Log", "log"},
                                                                  {"Sqrt", "sqrt"},
                                                                  {"Sin", "sin"},
                                                                  {"Cos", "cos"},
                                                                  {"Tanh", "tanh"},
                                                                  {"Erf", "erf"},
                                                                  {"Relu", "relu"},
                                                                  {"Sigmoid", "sigmoid"},
                                                                  {"Not", "logical_not"},
                                                                  {"Reciprocal", "reciprocal"},
                                                                  {"Floor", "floor"},
                                                                  {"Ceil", "ceil"},
                                                                  {"Round", "round"},
                                                                  {"Sign", "sign"},
                                                                  {"Softplus", "softplus"},
                                                                  {"IsNaN", "isnan"}}) {
    t[theirs] = unary(ours);
  }
  for (auto [theirs, ours] :
       std::initializer_list<std::pair<const char*, const char*>>{{"Add", "add"},
                                                                  {"Sub", "sub"},
                                                                  {"Mul", "mul"},
                                                                  {"Div", "div"},
                                                                  {"Pow", "pow"},
                                                                  {"Greater", "gt"},
                                                                  {"Less", "lt"},
                                                                  {"GreaterOrEqual", "ge"},
                                                                  {"LessOrEqual", "le"},
                                                                  {"BitwiseAnd", "and"},
                                                                  {"BitwiseOr", "or"},
                                                                  {"BitwiseXor", "xor"},
                                                                  {"And", "and"},
                                                                  {"Or", "or"},
                                                                  {"Xor", "xor"}}) {
    t[theirs] = binary(ours);
  }
  for (const char* name : {"Sum", "Mean"}) t[name] = folded_over("add");
  t["Min"] = folded_over("minimum");
  t["Max"] = folded_over("maximum");
  t["Equal"] = convert_equal;
  t["Where"] = convert_where;
  t["Cast"] = t["CastLike"] = convert_cast;
  t["Clip"] = convert_clip;
  t["Elu"] = t["Selu"] = convert_elu;
  t["LeakyRelu"] = t["PRelu"] = convert_leaky;
  t["Mod"] = convert_mod;
  t["BitShift"] = convert_shift;
  t["IsInf"] = convert_is_inf;
  t["Celu"] = convert_celu;
  t["Shrink"] = convert_shrink;
  t["Sinh"] = hyperbolic(true);
  t["Cosh"] = hyperbolic(false);
  t["Asinh"] = convert_asinh;
  t["Acosh"] = convert_acosh;
  t["Atanh"] = convert_atanh;
  t["Atan"] = arc(arc_tangent);
  t["Asin"] = arc(arc_sine);
  t["Acos"] = arc(arc_cosine);
  t["BitCast"] = convert_bitcast;
  t["Tan"] = [](Importer& m) {
    m.out(m.op("div", {m.op("sin", {m.in(0)}), m.op("cos", {m.in(0)})}));
  };
  t["BitwiseNot"] = [](Importer& m) {
    ValueId x = m.in(0);
    m.out(m.op("xor", {x, m.cast(ir::add_scalar(m.graph(), ir::DType::kI64, -1), m.dtype(x))}));
  };
  t["HardSigmoid"] = [](Importer& m) {
    m.out(clamped_line(m, m.in(0), m.f("alpha", 0.2), m.f("beta", 0.5)));
  };
  t["HardSwish"] = [](Importer& m) {
    ValueId x = m.in(0);
    m.out(m.op("mul", {x, clamped_line(m, x, 1.0 / 6, 0.5)}));
  };
  t["Gelu"] = [](Importer& m) {
    m.out(m.op(m.s("approximate", "none") == "tanh" ? "gelu_tanh" : "gelu", {m.in(0)}));
  };
  t["ThresholdedRelu"] = [](Importer& m) {
    ValueId x = m.in(0);
    ValueId above = m.op("gt", {x, m.number(x, m.f("alpha", 1))});
    m.out(m.op("where", {above, x, m.number(x, 0)}));
  };
  t["Mish"] = [](Importer& m) {
    ValueId x = m.in(0);
    m.out(m.op("mul", {x, m.op("tanh", {m.op("softplus", {x})})}));
  };
  t["Swish"] = [](Importer& m) {
    ValueId x = m.in(0);
    m.out(m.op("mul", {x, m.op("sigmoid", {m.op("mul", {x, m.number(x, m.f("alpha", 1))})})}));
  };
  t["Softsign"] = [](Importer& m) {
    ValueId x = m.in(0);
    m.out(m.op("div", {x, m.op("add", {m.op("abs", {x}), m.number(x, 1)})}));
  };
}

}  // namespace rm::onnx
