// Problems of every operator that the CPU backend has rows for, and its rows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "selfcheck/alike.hpp"

namespace rm::selfcheck_test {

Backend& cpu();
std::vector<std::string> operators();  // that the backend has rows for
/// At least one a operator, large ones among them.
std::vector<selfcheck::Shape> problems();

std::unique_ptr<select::Problem> problem_of(const selfcheck::Shape& shape);
bool supports(const rm_kernel& row, const selfcheck::Shape& shape, std::string* why_not = nullptr);
std::string text(rm_str s);

select::Operand dense(ir::DType dtype, ir::Ints dims, bool constant = false);
inline select::Operand absent() { return {false, {}, false}; }
selfcheck::Shape sdpa(int64_t s, int64_t t, int64_t e, ir::DType dtype = ir::DType::kF32);
selfcheck::Shape sdpa_backward(int64_t s, int64_t t, int64_t d, ir::DType dtype = ir::DType::kF32);
selfcheck::Shape quant_linear(int64_t m, int64_t n, int64_t k, int64_t bits, int64_t tile,
                              ir::DType dtype = ir::DType::kF32);
/// Two experts, [K,N] each, or stored as [N,K].
selfcheck::Shape grouped_gemm(int64_t m, int64_t n, int64_t k, bool turned, ir::DType dtype);
selfcheck::Shape gemm(int64_t m, int64_t n, int64_t k, ir::DType dtype = ir::DType::kF32);

}  // namespace rm::selfcheck_test
