// Sizes around the edges that each row names itself: one less, the edge, one more, and behind two.
#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <set>

#include "problems.hpp"
#include "selfcheck/row_check.hpp"

using namespace rm;
using namespace rm::selfcheck_test;
using selfcheck::Shape;

namespace {

using Make = std::function<Shape(int64_t)>;

/// Problems of an operator in which one axis has a given size, by the axis' letter.
std::map<char, std::vector<Make>> axes_of(const std::string& op) {
  using ir::DType;
  if (op == "gemm") {
    return {{'M', {[](int64_t n) { return gemm(n, 37, 70); },
                   [](int64_t n) { return gemm(n, 37, 70, DType::kBF16); }}},
            {'N', {[](int64_t n) { return gemm(5, n, 70); },
                   [](int64_t n) { return gemm(19, n, 70, DType::kBF16); }}},
            {'K', {[](int64_t n) { return gemm(5, 21, n); },
                   [](int64_t n) { return gemm(19, 21, n, DType::kBF16); }}}};
  }
  if (op == "grouped_gemm") {
    std::map<char, std::vector<Make>> out;
    for (bool turned : {false, true}) {
      for (DType t : {DType::kF32, DType::kBF16}) {
        out['M'].push_back([=](int64_t n) { return grouped_gemm(n, 37, 70, turned, t); });
        out['N'].push_back([=](int64_t n) { return grouped_gemm(19, n, 70, turned, t); });
        out['K'].push_back([=](int64_t n) { return grouped_gemm(19, 33, n, turned, t); });
      }
    }
    return out;
  }
  if (op == "sdpa") {
    return {{'S', {[](int64_t n) { return sdpa(n, 70, 40); }}},
            {'T', {[](int64_t n) { return sdpa(1, n, 40); }, [](int64_t n) { return sdpa(9, n, 40); }}},
            {'E', {[](int64_t n) { return sdpa(1, 70, n); }, [](int64_t n) { return sdpa(9, 70, n); }}}};
  }
  if (op == "sdpa_backward") {
    return {{'S', {[](int64_t n) { return sdpa_backward(n, 70, 40); }}},
            {'T', {[](int64_t n) { return sdpa_backward(9, n, 40); }}},
            {'D', {[](int64_t n) { return sdpa_backward(9, 70, n); }}},
            {'E', {[](int64_t n) { return sdpa_backward(9, 70, n); }}}};
  }
  if (op == "quant_linear") {
    std::map<char, std::vector<Make>> out;
    for (int64_t bits : {4, 8}) {
      for (int64_t tile : {1, 8}) {
        out['M'].push_back([=](int64_t n) { return quant_linear(n, 37, 96, bits, tile); });
        out['N'].push_back([=](int64_t n) { return quant_linear(5, n, 96, bits, tile); });
        out['N'].push_back([=](int64_t n) { return quant_linear(13, n, 96, bits, tile); });
        out['K'].push_back([=](int64_t n) { return quant_linear(5, 21, n, bits, tile); });
        out['M'].push_back([=](int64_t n) { return quant_linear(n, 37, 96, bits, tile, DType::kBF16); });
        out['N'].push_back([=](int64_t n) { return quant_linear(13, n, 96, bits, tile, DType::kBF16); });
        out['K'].push_back([=](int64_t n) { return quant_linear(13, 21, n, bits, tile, DType::kBF16); });
      }
    }
    return out;
  }
  auto reduced = [](int64_t n, const char* kind) {
    return Shape{"reduce", {dense(DType::kF32, {3, n})}, {dense(DType::kF32, {3, 1})},
                 {{"kind", std::string(kind)}, {"axes", ir::Ints{1}}}};
  };
  if (op == "reduce") {
    return {{0, {[=](int64_t n) { return reduced(n, "sum"); }, [=](int64_t n) { return reduced(n, "max"); },
                 [](int64_t n) {
                   return Shape{"reduce", {dense(DType::kF32, {5, n})}, {dense(DType::kF32, {1, n})},
                                {{"kind", std::string("sum")}, {"axes", ir::Ints{0}}}};
                 }}}};
  }
  if (op == "sort") {
    return {{0, {[](int64_t n) {
               return Shape{"sort", {dense(DType::kF32, {3, n})},
                            {dense(DType::kF32, {3, n}), dense(DType::kI64, {3, n})},
                            {{"axis", int64_t{1}}, {"descending", int64_t{0}}, {"k", int64_t{-1}}}};
             }}}};
  }
  if (op == "recurrent") {
    // An LSTM with a projection has all three axes: rows, units, and what goes into the next step.
    auto lstm = [](int64_t rows, int64_t units, int64_t fed) {
      return Shape{"recurrent",
                   {dense(DType::kF32, {3, rows, 4 * units}), dense(DType::kF32, {4 * units, fed}, true),
                    dense(DType::kF32, {rows, fed}), dense(DType::kF32, {rows, units}),
                    dense(DType::kF32, {4 * units}, true), dense(DType::kF32, {fed, units}, true)},
                   {dense(DType::kF32, {3, rows, fed}), dense(DType::kF32, {rows, fed}),
                    dense(DType::kF32, {rows, units})},
                   {{"cell", std::string("lstm")}, {"reverse", int64_t{0}}, {"batch_first", int64_t{0}}}};
    };
    return {{'M', {[=](int64_t n) { return lstm(n, 37, 20); }}},
            {'N', {[=](int64_t n) { return lstm(5, n, 20); }}},
            {'K', {[=](int64_t n) { return lstm(5, 37, n); }}}};
  }
  return {};
}

}  // namespace

TEST_CASE("every row that names edges is right on sizes around them") {
  std::set<std::string> tried;
  for (const rm_kernel& kernel : cpu().kernels()) {
    if (kernel.num_edges == 0) continue;
    const std::string op = text(kernel.op);
    const auto axes = axes_of(op);
    CAPTURE(text(kernel.name));
    REQUIRE(!axes.empty());  // an operator with edges needs problems here
    const select::Row row{&kernel, &cpu().get_device_info(0), "cpu"};
    std::map<char, std::set<int64_t>> sizes;
    for (size_t i = 0; i < kernel.num_edges; ++i) {
      const rm_edge& edge = kernel.edges[i];
      const auto letter = static_cast<char>(edge.axis);
      CAPTURE(letter);
      REQUIRE(axes.count(letter) == 1);
      for (int64_t size : {edge.size - 1, edge.size, edge.size + 1, 2 * edge.size + 1}) {
        if (size > 0) sizes[letter].insert(size);
      }
    }
    for (const auto& [letter, made] : sizes) {
      for (int64_t size : made) {
        for (const Make& make : axes.at(letter)) {
          const Shape shape = make(size);
          if (!supports(kernel, shape)) continue;
          CAPTURE(problem_of(shape)->str());
          CHECK(selfcheck::check_row(row, 0, shape) == "");
          tried.insert(op);
        }
      }
    }
  }
  CHECK(tried.size() >= 5);
}
