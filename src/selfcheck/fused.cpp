#include "selfcheck/fused.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ir/scalar.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/linear/quantized.hpp"
#include "ops/registry.hpp"

namespace rm::selfcheck {
namespace {

using ops::HostTensor;

const HostTensor* operand(const std::vector<Filled>& inputs, size_t i) {
  return i < inputs.size() && inputs[i].memory != nullptr ? &inputs[i].values : nullptr;
}

double at(const HostTensor& t, int64_t i) { return ir::load_element(t.type.dtype, t.at(i)); }

int activation_of(const Shape& s) {
  const auto name = attr_or<std::string>(s, "activation", "none");
  return static_cast<int>(ops::find_opcode(name == "none" ? "copy" : name)->opcode);
}

/// x as the products see it, and what they are multiplied by and what is added then: the norm's weight, its
/// root, and its bias.
struct Row {
  std::vector<float> x;
  double scale = 1;
  std::vector<float> shift;  // a layer norm's bias, as x
};

int64_t width_of(const HostTensor& x) { return x.type.dims.back().value(); }

/// Row `m` of x.
Row row_of(const Shape& shape, const std::vector<Filled>& inputs, int64_t m) {
  Row out;
  const HostTensor& x = *operand(inputs, 0);
  const int64_t k = width_of(x);
  const HostTensor* norm = operand(inputs, LinearsPlaces::kNorm);
  const HostTensor* bias = operand(inputs, LinearsPlaces::kNormBias);
  const double offset = attr_or<double>(shape, "weight_offset", 0);
  double squares = 0, mean = 0;
  if (attr_or<int64_t>(shape, "centred", 0) != 0) {
    for (int64_t i = 0; i < k; ++i) mean += at(x, m * k + i) / static_cast<double>(k);
  }
  for (int64_t i = 0; i < k; ++i) {
    const double v = at(x, m * k + i) - mean;
    squares += v * v;
    out.x.push_back(static_cast<float>(norm == nullptr ? v : v * (at(*norm, i) + offset)));
    if (bias != nullptr) out.shift.push_back(static_cast<float>(at(*bias, i)));
  }
  if (norm != nullptr) {
    const double mean = squares / static_cast<double>(k);
    out.scale = 1 / std::sqrt(mean + attr_or<double>(shape, "eps", 1e-5));
  }
  return out;
}

float single(ir::DType dtype, const char* bytes) {
  if (dtype != ir::DType::kBF16) return static_cast<float>(ir::load_element(dtype, bytes));
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Every row of w times x, or every column where `rows` is false. The operands are multiples of powers of two (operands.cpp): sums in
/// float32 are exact.
std::vector<double> products(const Row& row, const HostTensor& w, bool rows) {
  const size_t k = row.x.size();
  std::vector<double> out(static_cast<size_t>(w.type.dims[rows ? 0 : 1].value()));
  std::vector<float> weights(k);
  for (size_t j = 0; j < out.size(); ++j) {
    const char* from = w.at(static_cast<int64_t>(rows ? j * k : j));
    const size_t step = ir::size_bytes(w.type.dtype) * (rows ? 1 : out.size());
    for (size_t i = 0; i < k; ++i) weights[i] = single(w.type.dtype, from + i * step);
    float sum = 0;
    for (size_t i = 0; i < k; ++i) sum += row.x[i] * weights[i];
    out[j] = sum * row.scale;
  }
  return out;
}

/// The same of a weight of 8 or 4 bits in pairs; within a group integers are summed.
std::vector<double> products(const Row& row, const HostTensor& q, const HostTensor& scales,
                             const Shape& shape) {
  const auto k = static_cast<int64_t>(row.x.size());
  const ops::QuantLayout layout{k, attr_or<int64_t>(shape, "bits", 8), attr_or<int64_t>(shape, "group", 32),
                                q.type.dims[0].value(), 1, true};
  const auto* bytes = reinterpret_cast<const uint8_t*>(q.bytes.data());
  const int zero = layout.bits == 4 ? 8 : 0;
  std::vector<double> out(static_cast<size_t>(layout.rows));
  for (int64_t r = 0; r < layout.rows; ++r) {
    double sum = 0;
    for (int64_t g = 0; g < layout.groups(); ++g) {
      float of_group = 0;
      for (int64_t i = g * layout.group; i < std::min(k, (g + 1) * layout.group); ++i) {
        of_group += row.x[static_cast<size_t>(i)] * static_cast<float>(layout.get(bytes, r, i) - zero);
      }
      sum += of_group * at(scales, layout.scale_at(r, g));
    }
    out[static_cast<size_t>(r)] = sum * row.scale;
  }
  return out;
}

std::vector<int64_t> all_of(const HostTensor& t) {
  std::vector<int64_t> out(static_cast<size_t>(t.size()));
  std::iota(out.begin(), out.end(), int64_t{0});
  return out;
}

std::vector<Part> linears(const Shape& shape, const std::vector<Filled>& inputs,
                          const std::vector<Filled>& before) {
  const bool gated = attr_or<int64_t>(shape, "gated", 0) != 0;
  const int activation = activation_of(shape);
  const HostTensor* residual = operand(inputs, LinearsPlaces::kResidual);
  const LinearsPlaces places(shape.op);
  const auto plain = [&](const Row& row, size_t i) {
    const size_t w = places.weight(i);
    return places.is_quantised() ? products(row, *operand(inputs, w), *operand(inputs, w + 1), shape)
                                 : products(row, *operand(inputs, w), attr_or<int64_t>(shape, "trans_b", 1) != 0);
  };
  const auto product = [&](const Row& row, size_t i) {
    std::vector<double> out = plain(row, i);
    if (row.shift.empty()) return out;
    const std::vector<double> shift = plain({row.shift, 1, {}}, i);
    for (size_t j = 0; j < out.size(); ++j) out[j] += shift[j];
    return out;
  };
  std::vector<Part> out;
  for (size_t y = 0; y < before.size(); ++y) {
    const HostTensor* bias = operand(inputs, places.bias(y));
    const HostTensor& x = *operand(inputs, 0);
    std::vector<double> values;
    for (int64_t m = 0; m * width_of(x) < x.size(); ++m) {
      const Row row = row_of(shape, inputs, m);
      std::vector<double> of_row = product(row, y), second;
      if (gated) second = product(row, 1);
      for (size_t j = 0; j < of_row.size(); ++j) {
        double& v = of_row[j];
        if (bias != nullptr) v += at(*bias, static_cast<int64_t>(j));
        v = ops::apply_float(activation, v, 0, 0);
        if (gated) v *= second[j];
        if (residual != nullptr) v += at(*residual, static_cast<int64_t>(values.size() + j));
      }
      values.insert(values.end(), of_row.begin(), of_row.end());
    }
    HostTensor result = ops::from_doubles(before[y].values.type, values);
    std::vector<int64_t> all = all_of(result);
    out.push_back({y, std::move(result), std::move(all)});
  }
  return out;
}

std::vector<Part> append_sdpa(const Shape& shape, const std::vector<Filled>& inputs,
                              const std::vector<Filled>& before) {
  ir::Node rope, attention;
  rope.op = "rope", rope.attrs = {{"interleaved", int64_t{0}}};
  attention.op = "sdpa";
  attention.attrs = {{"scale", attr_or<double>(shape, "scale", 1)}, {"is_causal", int64_t{0}}};
  const auto turned = [&](size_t i) {
    const HostTensor& x = *operand(inputs, i);
    if (operand(inputs, 3) == nullptr) return x;
    // Angles are those of one head, which the operand repeats as often as there are queries.
    HostTensor cos = *operand(inputs, 3), sin = *operand(inputs, 4);
    const int64_t heads = cos.type.dims[1].value();
    if (heads != x.type.dims[1].value()) {
      for (HostTensor* t : {&cos, &sin}) {
        const std::vector<int64_t> sizes = ops::sizes(t->type.dims);
        ir::TensorType one = t->type;
        one.dims[1] = int64_t{1};
        t->bytes = ops::take(*t, one, ops::strided_offsets(ops::sizes(one.dims), ops::contiguous_strides(sizes))).bytes;
        t->type = one;
      }
    }
    return ops::get("rope").reference(rope, {&x, &cos, &sin}, {x.type})[0];
  };
  const HostTensor q = turned(0), k = turned(1);
  const int64_t position = ops::to_ints(*operand(inputs, 5))[0];
  HostTensor caches[2] = {before[1].values, before[2].values};
  const HostTensor* fresh[2] = {&k, operand(inputs, 2)};
  const ops::AxisSplit split = ops::split_at(caches[0].type.dims, 2);
  const size_t row = static_cast<size_t>(split.inner) * ir::size_bytes(k.type.dtype);
  for (int i = 0; i < 2; ++i) {
    for (int64_t o = 0; o < split.outer; ++o) {
      std::copy_n(fresh[i]->at(o * split.inner), row, caches[i].at((o * split.size + position) * split.inner));
    }
  }
  const HostTensor last = ops::from_ints({ir::DType::kI64, {int64_t{1}}}, {position});
  const bool ends = attr_or<int64_t>(shape, "ends", 0) != 0;
  HostTensor o = ops::get("sdpa").reference(
      attention, {&q, &caches[0], &caches[1], operand(inputs, 6), ends ? &last : nullptr},
      {before[0].values.type})[0];
  std::vector<Part> out;
  const auto whole = [&](HostTensor t) {
    std::vector<int64_t> all = all_of(t);
    out.push_back({out.size(), std::move(t), std::move(all)});
  };
  whole(std::move(o)), whole(std::move(caches[0])), whole(std::move(caches[1]));
  return out;
}

std::vector<Part> adams(const Shape& shape, const std::vector<Filled>& inputs,
                        const std::vector<Filled>& before) {
  ir::Node node;
  node.op = "adam", node.attrs = shape.attrs;
  std::vector<Part> out;
  for (size_t i = 2, y = 0; i + 3 < inputs.size(); i += 4, y += 3) {
    std::vector<ir::TensorType> types;
    for (size_t k = 0; k < 3; ++k) types.push_back(before[y + k].values.type);
    std::vector<HostTensor> results = ops::get("adam").reference(
        node, {operand(inputs, i), operand(inputs, i + 1), operand(inputs, i + 2), operand(inputs, i + 3),
               operand(inputs, 0), nullptr, operand(inputs, 1)}, types);
    for (size_t k = 0; k < 3; ++k) {
      std::vector<int64_t> all = all_of(results[k]);
      out.push_back({y + k, std::move(results[k]), std::move(all)});
    }
  }
  return out;
}

/// a b of matrices, rounded once; `turn_a`: a is [K, M], `turn_b`: b is [N, K].
HostTensor product(const HostTensor& a, bool turn_a, const HostTensor& b, bool turn_b,
                   const ir::TensorType& type) {
  const int64_t m = type.dims[0].value(), n = type.dims[1].value();
  const int64_t k = a.type.dims[turn_a ? 0 : 1].value();
  std::vector<double> out(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += at(a, turn_a ? l * m + i : i * k + l) * at(b, turn_b ? j * k + l : l * n + j);
      }
      out[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return ops::from_doubles(type, out);
}

std::vector<Part> gemm_ewise(const Shape& shape, const std::vector<Filled>& inputs,
                             const std::vector<Filled>& before) {
  const ir::TensorType type = before[0].values.type;
  const bool turn_b = attr_or<int64_t>(shape, "trans_b", 1) != 0;
  const HostTensor made = product(*operand(inputs, 0), false, *operand(inputs, 1), turn_b, type);
  ir::Node node;
  node.op = "ewise", node.attrs = {{"code", shape.attrs.at("code")}, {"imm", shape.attrs.at("imm")}};
  std::vector<const HostTensor*> operands{&made};
  for (size_t i = 2; i < inputs.size(); ++i) operands.push_back(operand(inputs, i));
  HostTensor result = ops::get("ewise").reference(node, operands, {type})[0];
  std::vector<int64_t> all = all_of(result);
  std::vector<Part> out;
  out.push_back({0, std::move(result), std::move(all)});
  return out;
}

std::vector<Part> slopes(const std::vector<Filled>& inputs, const std::vector<Filled>& before) {
  std::vector<Part> out;
  const auto whole = [&](size_t y, HostTensor t) {
    std::vector<int64_t> all = all_of(t);
    out.push_back({y, std::move(t), std::move(all)});
  };
  for (size_t i = 0; i + 1 < inputs.size(); i += 2) {
    const HostTensor &g = *operand(inputs, i), &x = *operand(inputs, i + 1);
    whole(i, product(g, true, x, false, before[i].values.type));
    if (before[i + 1].memory == nullptr) continue;
    const int64_t rows = g.type.dims[0].value(), n = g.type.dims[1].value();
    std::vector<double> sums(static_cast<size_t>(n));
    for (int64_t e = 0; e < rows * n; ++e) sums[static_cast<size_t>(e % n)] += at(g, e);
    whole(i + 1, ops::from_doubles(before[i + 1].values.type, sums));
  }
  return out;
}

/// The program of small_steps (plan/small_program.hpp), part by part.
class SmallSteps {
 public:
  SmallSteps(const Shape& shape, const std::vector<Filled>& inputs, const std::vector<Filled>& before)
      : shape_(shape), program_(std::get<ir::Ints>(shape.attrs.at("program"))), inputs_(inputs.size()) {
    for (const Filled& f : inputs) values_.push_back(f.values);
    for (const Filled& f : before) values_.push_back(f.values);
    const int64_t inner = next();
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t code = next();
      ir::TensorType type{ir::DType::kF32, {next()}};
      ir::from_dlpack({static_cast<uint8_t>(code >> 8), static_cast<uint8_t>(code & 255), 1}, &type.dtype);
      values_.push_back(ops::zeros(type));
    }
  }

  std::vector<Part> run(size_t outputs) {
    while (at_ < program_.size()) part();
    std::vector<Part> out;
    for (size_t y = 0; y < outputs; ++y) {
      HostTensor& t = values_[inputs_ + y];
      std::vector<int64_t> all = all_of(t);
      out.push_back({y, std::move(t), std::move(all)});
    }
    return out;
  }

 private:
  struct Place {
    size_t slot;
    ir::Ints sizes;
    std::vector<int64_t> elements;  // in its value, where that is no input
  };

  int64_t next() { return program_.at(at_++); }

  Place place(ir::Ints sizes) {
    Place out{static_cast<size_t>(next()), std::move(sizes), {}};
    if (out.slot < inputs_) return out;
    const int64_t offset = next();
    ir::Ints strides;
    for (size_t d = 0; d < out.sizes.size(); ++d) strides.push_back(next());
    out.elements = ops::strided_offsets(out.sizes, strides);
    for (int64_t& e : out.elements) e += offset;
    return out;
  }

  HostTensor value(const Place& p) const {
    const HostTensor& whole = values_[p.slot];
    if (p.slot < inputs_) return whole;
    ir::TensorType type{whole.type.dtype, {}};
    for (int64_t d : p.sizes) type.dims.emplace_back(d);
    return ops::take(whole, type, p.elements);
  }

  void part() {
    constexpr const char* kOps[] = {"ewise", "reduce", "softmax", "gather"};
    constexpr const char* kKinds[] = {"sum", "mean", "max", "min"};
    const auto op = static_cast<size_t>(next());
    const int64_t a = next(), b = next(), rank = next();
    ir::Ints sizes;
    for (int64_t d = 0; d < rank; ++d) sizes.push_back(next());
    const int64_t count = next();
    ir::Node node;
    node.op = kOps[op];
    ir::Ints made = sizes, looked_into = sizes;
    if (op == 0) {
      const auto& code = std::get<ir::Ints>(shape_.attrs.at("code"));
      node.attrs = {{"code", ir::Ints(code.begin() + 5 * a, code.begin() + 5 * (a + b))},
                    {"imm", shape_.attrs.at("imm")}};
    } else if (op == 1) {
      ir::Ints axes;
      for (int64_t d = 0; d < rank; ++d) {
        if ((b >> d & 1) != 0) axes.push_back(d), made[static_cast<size_t>(d)] = 1;
      }
      node.attrs = {{"axes", axes}, {"kind", std::string(kKinds[a])}, {"keepdim", int64_t{1}}};
    } else if (op == 2) {
      node.attrs = {{"log", a}, {"axis", rank - 1}};
    } else {
      node.attrs = {{"axis", a}};
      looked_into[static_cast<size_t>(a)] = b;
    }
    const Place to = place(made);
    std::vector<HostTensor> given;
    for (int64_t i = 0; i < count; ++i) given.push_back(value(place(op == 3 && i == 0 ? looked_into : sizes)));
    std::vector<const HostTensor*> operands;
    for (const HostTensor& t : given) operands.push_back(&t);
    HostTensor& whole = values_[to.slot];
    ir::TensorType type{whole.type.dtype, {}};
    for (int64_t d : made) type.dims.emplace_back(d);
    const HostTensor result = ops::get(node.op).reference(node, operands, {type})[0];
    const size_t item = ir::size_bytes(type.dtype);
    for (size_t e = 0; e < to.elements.size(); ++e) {
      std::copy_n(result.at(static_cast<int64_t>(e)), item, whole.at(to.elements[e]));
    }
  }

  const Shape& shape_;
  const ir::Ints& program_;
  size_t inputs_, at_ = 0;
  std::vector<HostTensor> values_;
};

}  // namespace

bool is_fused(std::string_view op) {
  return op == "linears" || op == "quant_linears" || op == "append_sdpa" || op == "adams" ||
         op == "gemm_ewise" || op == "slopes" || op == "small_steps";
}

std::vector<Part> expected_fused(const Shape& shape, const std::vector<Filled>& inputs,
                                 const std::vector<Filled>& before) {
  if (shape.op == "adams") return adams(shape, inputs, before);
  if (shape.op == "gemm_ewise") return gemm_ewise(shape, inputs, before);
  if (shape.op == "slopes") return slopes(inputs, before);
  if (shape.op == "small_steps") return SmallSteps(shape, inputs, before).run(before.size());
  return shape.op == "append_sdpa" ? append_sdpa(shape, inputs, before) : linears(shape, inputs, before);
}

}  // namespace rm::selfcheck
