#include "ops/ewise/patterns.hpp"

#include "ops/ewise/kernels.hpp"
#include "ops/ewise/opcodes.hpp"

namespace rm::cpu {
namespace {

constexpr size_t kWords = 5;  // of an instruction: opcode, class, three registers

class Reader {
 public:
  Reader(std::span<const int64_t> code, std::span<const double> imm, size_t operands)
      : code_(code), imm_(imm), operands_(static_cast<int64_t>(operands)) {}

  /// The x of (erf(x / sqrt 2) + 1) / 2, -1 when register r is something else.
  int64_t normal_cdf(int64_t r) const {
    const int64_t sum = times(r, 0.5f), erf = plus_one(sum);
    return defines(erf, kErf) ? times(word(erf, 2), 0.70710678f) : -1;
  }

  /// Whether register r is x exp(x^2 * -1/2) / sqrt(2 pi).
  bool is_slope_of_cdf(int64_t r, int64_t x) const {
    const int64_t exp = times(factor(r, x), 0.39894228f);
    return defines(exp, kExp) && factor(times(word(exp, 2), -0.5f), x) == x;
  }

  bool defines(int64_t r, int op) const {
    const int64_t at = r - operands_;
    return r >= operands_ && at < static_cast<int64_t>(code_.size() / kWords) &&
           word(r, 0) == op && word(r, 1) == static_cast<int64_t>(Class::f32);
  }
  int64_t word(int64_t r, size_t i) const {
    return code_[static_cast<size_t>(r - operands_) * kWords + i];
  }

 private:
  bool is_number(int64_t r, float value) const {
    if (!defines(r, kConst)) return false;
    const int64_t i = word(r, 2);
    return i >= 0 && i < static_cast<int64_t>(imm_.size()) &&
           static_cast<float>(imm_[static_cast<size_t>(i)]) == value;
  }
  /// What a product of register x multiplies it by, -1 for none.
  int64_t factor(int64_t r, int64_t x) const {
    if (!defines(r, kMul)) return -1;
    return word(r, 2) == x ? word(r, 3) : word(r, 3) == x ? word(r, 2) : -1;
  }
  int64_t beside_number(int64_t r, int op, float value) const {
    if (!defines(r, op)) return -1;
    return is_number(word(r, 3), value) ? word(r, 2) : is_number(word(r, 2), value) ? word(r, 3) : -1;
  }
  int64_t times(int64_t r, float value) const { return beside_number(r, kMul, value); }
  int64_t plus_one(int64_t r) const { return beside_number(r, kAdd, 1.0f); }

  std::span<const int64_t> code_;
  std::span<const double> imm_;
  int64_t operands_;
};

}  // namespace

std::vector<int64_t> gelu_slopes(std::span<const int64_t> code, std::span<const double> imm,
                                 size_t operands) {
  std::vector<int64_t> out(code.size() / kWords, -1);
  const Reader read(code, imm, operands);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto r = static_cast<int64_t>(operands + i);
    if (!read.defines(r, kAdd)) continue;
    for (size_t first : {size_t{2}, size_t{3}}) {
      const int64_t x = read.normal_cdf(read.word(r, first));
      if (x >= 0 && read.is_slope_of_cdf(read.word(r, 5 - first), x)) out[i] = x;
    }
  }
  return out;
}

std::vector<char> needed(std::span<const int64_t> code, std::span<const int64_t> slopes,
                         size_t operands) {
  std::vector<char> out(slopes.size(), 0);
  const auto need = [&](int64_t r) {
    const int64_t i = r - static_cast<int64_t>(operands);
    if (i >= 0 && i < static_cast<int64_t>(out.size())) out[static_cast<size_t>(i)] = 1;
  };
  if (!out.empty()) out.back() = 1;
  for (size_t i = out.size(); i-- > 0;) {
    if (!out[i]) continue;
    const int64_t* ins = &code[i * kWords];
    if (slopes[i] >= 0) {
      need(slopes[i]);
    } else if (ins[0] != kConst) {
      for (int64_t a = 0; a < arity_of(ins[0]); ++a) need(ins[2 + a]);
    }
  }
  return out;
}

}  // namespace rm::cpu
