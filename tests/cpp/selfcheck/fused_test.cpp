// The references of the fused operators against kernels written here, element by element, which
// also are made wrong.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "ir/scalar.hpp"
#include "problems.hpp"
#include "selfcheck/row_check.hpp"

using namespace rm;
using namespace rm::selfcheck_test;

namespace {

// The problem being run; kernels are C functions.
const selfcheck::Shape* running = nullptr;
int wrong_output = -1;
const rm_kernel_state* const kState = reinterpret_cast<const rm_kernel_state*>(&running);

struct View {
  const ir::Layout& layout;
  std::byte* data;
  std::byte* at(std::initializer_list<int64_t> place) const {
    int64_t offset = 0;
    size_t d = 0;
    for (int64_t i : place) offset += i * layout.strides[d++];
    return data + offset * static_cast<int64_t>(ir::size_bytes(layout.dtype));
  }
  double get(std::initializer_list<int64_t> place) const { return ir::load_element(layout.dtype, at(place)); }
  void set(std::initializer_list<int64_t> place, double x) const {
    ir::store_element(layout.dtype, at(place), x);
  }
  double rounded(double x) const {
    char bytes[8];
    ir::store_element(layout.dtype, bytes, x);
    return ir::load_element(layout.dtype, bytes);
  }
};

View input(const rm_launch* l, size_t i) {
  return {running->inputs[i].layout, static_cast<std::byte*>(const_cast<void*>(l->inputs[i]))};
}
View output(const rm_launch* l, size_t i) {
  return {running->outputs[i].layout, static_cast<std::byte*>(l->outputs[i])};
}

/// Element i of a row of the weight that operand `at` is; in integers of 8 bits, or of 4 in pairs with
/// 8 added, and scales of groups, or as it is.
double weight_at(const rm_launch* l, size_t at, int64_t row, int64_t i) {
  if (running->op == "linears") {
    const bool rows = std::get<int64_t>(running->attrs.at("trans_b")) != 0;
    return rows ? input(l, at).get({row, i}) : input(l, at).get({i, row});
  }
  const auto attr = [](const char* name) { return std::get<int64_t>(running->attrs.at(name)); };
  const bool bytes = attr("bits") == 8;
  double q = input(l, at).get({row, bytes ? i : i / 2});
  if (!bytes) q = (static_cast<int>(q) >> (i % 2 * 4) & 15) - 8;
  return q * input(l, at + 1).get({i / attr("group"), row});
}

rm_status* run_linears(const rm_launch* l) {
  const auto attr = [](const char* name) { return std::get<double>(running->attrs.at(name)); };
  const bool gated = std::get<int64_t>(running->attrs.at("gated")) != 0;
  const View x = input(l, 0);
  const int64_t k = x.layout.dims.back();
  const auto mean_of = [&](int64_t m) {
    double sum = 0;
    if (std::get<int64_t>(running->attrs.at("centred")) == 0) return sum;
    for (int64_t i = 0; i < k; ++i) sum += x.get({m, i});
    return sum / static_cast<double>(k);
  };
  const auto root_of = [&](int64_t m, double mean) {
    double squares = 0;
    for (int64_t i = 0; i < k; ++i) squares += (x.get({m, i}) - mean) * (x.get({m, i}) - mean);
    return std::sqrt(squares / static_cast<double>(k) + attr("eps"));
  };
  const size_t each = running->op == "linears" ? 2 : 3;  // operands of a weight, the bias is the last
  const auto times = [&](int64_t m, size_t weight, int64_t row) {
    const View norm = input(l, 1);
    const double mean = mean_of(m), root = root_of(m, mean);
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      double v = (x.get({m, i}) - mean) / root * (norm.get({i}) + attr("weight_offset"));
      if (l->inputs[2] != nullptr) v += input(l, 2).get({i});
      sum += v * weight_at(l, 4 + each * weight, row, i);
    }
    const size_t bias = 3 + each * (weight + 1);
    return l->inputs[bias] == nullptr ? sum : sum + input(l, bias).get({row});
  };
  for (size_t y = 0; y < running->outputs.size(); ++y) {
    const int64_t n = running->outputs[y].layout.dims.back();
    const int64_t rows = x.layout.dims[0];
    for (int64_t at = 0; at < rows * n; ++at) {
      const int64_t m = at / n, j = at % n;
      double v = times(m, y, j);
      if (gated) v = v / (1 + std::exp(-v)) * times(m, 1, j);
      if (!gated && std::get<std::string>(running->attrs.at("activation")) == "gelu_tanh") {
        v = 0.5 * v * (1 + std::tanh(0.79788456080286536 * (v + 0.044715 * v * v * v)));
      }
      if (l->inputs[3] != nullptr) v += input(l, 3).get({m, j});
      if (wrong_output == static_cast<int>(y) && at == rows * n - 1) v += 0.25 * (1 + std::abs(v));
      output(l, y).set({m, j}, v);
    }
  }
  return nullptr;
}

rm_status* run_append_sdpa(const rm_launch* l) {
  const View q = input(l, 0), o = output(l, 0);
  const ir::Ints& dims = q.layout.dims;
  const int64_t groups = running->outputs[1].layout.dims[1], keys = running->outputs[1].layout.dims[2];
  const int64_t d = dims[3], share = dims[1] / groups;
  int64_t position = 0;
  std::memcpy(&position, l->inputs[5], sizeof position);
  const bool ends = std::get<int64_t>(running->attrs.at("ends")) != 0;
  const auto turned = [&](const View& t, int64_t b, int64_t h, int64_t i) {
    if (l->inputs[3] == nullptr) return t.get({b, h, 0, i});
    const View cos = input(l, 3), sin = input(l, 4);
    const double partner = i < d / 2 ? -t.get({b, h, 0, i + d / 2}) : t.get({b, h, 0, i - d / 2});
    return t.rounded(t.get({b, h, 0, i}) * cos.get({b, 0, 0, i}) + partner * sin.get({b, 0, 0, i}));
  };
  for (int64_t b = 0; b < dims[0]; ++b) {
    for (int64_t h = 0; h < dims[1]; ++h) {
      const int64_t g = h / share;
      for (int64_t i = 0; i < d; ++i) {
        output(l, 1).set({b, g, position, i}, turned(input(l, 1), b, g, i));
        output(l, 2).set({b, g, position, i}, input(l, 2).get({b, g, 0, i}));
      }
      std::vector<double> sum(static_cast<size_t>(d));
      double total = 0;
      for (int64_t t = 0; t < (ends ? position + 1 : keys); ++t) {
        if (l->inputs[6] != nullptr && input(l, 6).get({b, h, 0, t}) == 0) continue;
        double score = 0;
        for (int64_t i = 0; i < d; ++i) score += turned(q, b, h, i) * output(l, 1).get({b, g, t, i});
        const double p = std::exp(score * std::get<double>(running->attrs.at("scale")));
        total += p;
        for (int64_t i = 0; i < d; ++i) sum[static_cast<size_t>(i)] += p * output(l, 2).get({b, g, t, i});
      }
      for (int64_t i = 0; i < d; ++i) {
        o.set({b, h, 0, i}, total == 0 ? 0 : sum[static_cast<size_t>(i)] / total);
      }
    }
  }
  // One element: of the attention, or of a cache where nothing is appended.
  if (wrong_output == 0) o.set({0, 1, 0, d - 1}, o.get({0, 1, 0, d - 1}) + 0.5);
  if (wrong_output > 0) {
    const View cache = output(l, static_cast<size_t>(wrong_output));
    cache.set({0, 0, 1, 0}, cache.get({0, 0, 1, 0}) + 0.5);
  }
  return nullptr;
}

rm_status* run_adams(const rm_launch* l) {
  const auto at = [](const void* p, int64_t i) { return static_cast<double>(static_cast<const float*>(p)[i]); };
  const auto n = [&](int64_t i) { return at(l->inputs[0], i); };
  const bool applies = l->inputs[1] == nullptr || *static_cast<const bool*>(l->inputs[1]);
  const bool from_parameter = std::get<std::string>(running->attrs.at("decay")) == "parameter";
  for (size_t y = 0; y < running->outputs.size(); y += 3) {
    const size_t i = 2 + y / 3 * 4;
    const auto to = [&](size_t k) { return static_cast<float*>(l->outputs[y + k]); };
    const int64_t size = running->inputs[i].layout.num_elements();
    for (int64_t e = 0; e < size; ++e) {
      double p = at(l->inputs[i], e), g = at(l->inputs[i + 1], e);
      double m = at(l->inputs[i + 2], e), v = at(l->inputs[i + 3], e);
      if (applies) {
        from_parameter ? p *= n(1) : g += p * n(0);
        m += (g - m) * n(2), v = v * n(3) + g * g * n(4);
        p -= m / (std::sqrt(v) / n(7) + n(5)) * n(6);
      }
      to(0)[e] = static_cast<float>(p), to(1)[e] = static_cast<float>(m), to(2)[e] = static_cast<float>(v);
    }
    if (wrong_output >= static_cast<int>(y) && wrong_output < static_cast<int>(y) + 3) {
      to(static_cast<size_t>(wrong_output) - y)[size - 1] += 0.5f;
    }
  }
  return nullptr;
}

/// Relu's slope: 0 where the third operand is at most 0; times the fourth.
rm_status* run_gemm_ewise(const rm_launch* l) {
  const View a = input(l, 0), b = input(l, 1), y = output(l, 0);
  const bool rows = std::get<int64_t>(running->attrs.at("trans_b")) != 0;
  const int64_t m = y.layout.dims[0], n = y.layout.dims[1];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.layout.dims[1]; ++k) sum += a.get({i, k}) * (rows ? b.get({j, k}) : b.get({k, j}));
      sum = input(l, 2).get({i, j}) <= 0 ? 0 : sum * input(l, 3).get({i, j});
      if (wrong_output == 0 && i == m - 1 && j == n - 1) sum += 0.5;
      y.set({i, j}, sum);
    }
  }
  return nullptr;
}

rm_status* run_slopes(const rm_launch* l) {
  for (size_t p = 0; p < running->inputs.size(); p += 2) {
    const View g = input(l, p), x = input(l, p + 1);
    const int64_t m = g.layout.dims[0], n = g.layout.dims[1], k = x.layout.dims[1];
    for (int64_t j = 0; j < n; ++j) {
      double column = 0;
      for (int64_t r = 0; r < m; ++r) column += g.get({r, j});
      if (wrong_output == static_cast<int>(p) + 1 && j == n - 1) column += 0.5;
      if (l->outputs[p + 1] != nullptr) output(l, p + 1).set({j}, column);
      for (int64_t i = 0; i < k; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < m; ++r) sum += g.get({r, j}) * x.get({r, i});
        if (wrong_output == static_cast<int>(p) && j == n - 1 && i == k - 1) sum += 0.5;
        output(l, p).set({j, i}, sum);
      }
    }
  }
  return nullptr;
}

/// x times its log-softmax, plus the latter's sum by row; and the log-softmax at a class of each row.
rm_status* run_small_steps(const rm_launch* l) {
  const View x = input(l, 0), y = output(l, 0);
  const int64_t m = x.layout.dims[0], n = x.layout.dims[1];
  for (int64_t i = 0; i < m; ++i) {
    double most = x.get({i, 0}), total = 0, sum = 0;
    for (int64_t j = 1; j < n; ++j) most = std::max(most, x.get({i, j}));
    for (int64_t j = 0; j < n; ++j) total += std::exp(x.get({i, j}) - most);
    const auto logarithm = [&](int64_t j) { return x.get({i, j}) - most - std::log(total); };
    for (int64_t j = 0; j < n; ++j) sum += logarithm(j);
    const auto wrong = [&](int of) { return wrong_output == of && i == m - 1 ? 0.25 : 0; };
    for (int64_t j = 0; j < n; ++j) {
      y.set({i, j}, x.get({i, j}) * logarithm(j) + sum + (j == n - 1 ? wrong(0) * (1 + std::abs(sum)) : 0));
    }
    int64_t looked_up = 0;
    std::memcpy(&looked_up, input(l, 1).at({i, 0}), sizeof looked_up);
    output(l, 1).set({i, 0}, logarithm(looked_up) + wrong(1));
  }
  return nullptr;
}

rm_kernel kernel_of(const std::string& op) {
  static constexpr rm_edge kEdges[] = {{'N', 0, 32}, {'K', 0, 64}, {'T', 0, 16}};
  rm_kernel out{};
  out.struct_size = sizeof out;
  out.op = {op.data(), op.size()}, out.name = {"written_here", 12};
  out.edges = kEdges, out.num_edges = std::size(kEdges);
  out.prepare = [](const rm_problem*, const rm_device_info*, uint32_t, rm_kernel_state** state) -> rm_status* {
    *state = const_cast<rm_kernel_state*>(kState);
    return nullptr;
  };
  out.launch = op == "append_sdpa"   ? run_append_sdpa
               : op == "adams"       ? run_adams
               : op == "gemm_ewise"  ? run_gemm_ewise
               : op == "slopes"      ? run_slopes
               : op == "small_steps" ? run_small_steps
                                     : run_linears;
  return out;
}

}  // namespace

TEST_CASE("fused steps are compared with what their parts give, in every result") {
  int count = 0, small_steps = 0;
  for (const auto& shape : problems()) {
    if (shape.op != "linears" && shape.op != "quant_linears" && shape.op != "append_sdpa" &&
        shape.op != "adams" && shape.op != "gemm_ewise" && shape.op != "slopes" && shape.op != "small_steps") {
      continue;
    }
    const rm_kernel kernel = kernel_of(shape.op);
    const select::Row row{&kernel, &cpu().get_device_info(0), "here"};
    const selfcheck::Shape small = selfcheck::alike(*problem_of(shape), kernel);
    running = &small;
    CAPTURE(problem_of(shape)->str());
    CAPTURE(problem_of(small)->str());
    wrong_output = -1;
    CHECK(selfcheck::check_row(row, 0, small) == "");
    for (size_t i = 0; i < small.outputs.size(); ++i) {
      if (!small.outputs[i].present) continue;
      wrong_output = static_cast<int>(i);
      CHECK(selfcheck::check_row(row, 0, small) != "");
    }
    ++count, small_steps += shape.op == "small_steps";
  }
  CHECK(count >= 40);
  CHECK(small_steps == 2);
}
