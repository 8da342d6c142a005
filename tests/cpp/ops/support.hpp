// Small helpers of the operator tests: float tensors and graphs from text.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/evaluate.hpp"
#include "ops/registry.hpp"

namespace rm::test {

inline ops::HostTensor tensor(ir::DType dtype, ir::Dims dims, const std::vector<double>& values) {
  return ops::from_doubles({dtype, std::move(dims)}, values);
}
inline ops::HostTensor f32(ir::Dims dims, const std::vector<double>& values) {
  return tensor(ir::DType::kF32, std::move(dims), values);
}
inline ops::HostTensor i64(ir::Dims dims, const std::vector<double>& values) {
  return tensor(ir::DType::kI64, std::move(dims), values);
}

/// Parses, verifies, checks types and evaluates.
inline std::vector<ops::HostTensor> run(const std::string& body,
                                        const std::vector<ops::HostTensor>& inputs) {
  ir::Graph graph = ir::parse("rmir 1\n" + body);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return ops::evaluate(graph, inputs);
}

inline void check_close(const ops::HostTensor& got, const std::vector<double>& want,
                        double tolerance = 1e-6) {
  std::vector<double> values = ops::to_doubles(got);
  REQUIRE(values.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    if (std::isnan(want[i])) {
      CHECK(std::isnan(values[i]));
    } else if (std::isinf(want[i])) {
      CHECK(values[i] == want[i]);
    } else {
      CHECK(std::fabs(values[i] - want[i]) <= tolerance * (1 + std::fabs(want[i])));
    }
  }
}

/// The message of the rm::Error that checking `body` throws, empty when it throws none.
inline std::string type_error(const std::string& body) {
  ir::Graph graph = ir::parse("rmir 1\n" + body);
  try {
    ops::infer_and_check(graph);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace rm::test
