// Checks operands and turns a quant_linear into the gemm whose epilogue and folding it shares.
#include "ops/quant/problem.hpp"

#include <stdexcept>
#include <string>

namespace rm::cpu::quant {
namespace {

void require(bool holds, const char* expected) {
  if (!holds) throw std::invalid_argument(std::string("[quant_linear] expected ") + expected);
}

/// Scales and zero points: [N, G] f16, dense along G.
int64_t grouped_row(const View& v, int64_t n, int64_t groups) {
  require(v.dtype == DType::f16 && v.rank() == 2 && v.dim(0) == n && v.dim(1) == groups,
          "scales and zero points f16 [N, G]");
  require(groups <= 1 || v.step(1) == 1, "scales and zero points dense along groups");
  return v.step(0);
}

}  // namespace

void read_grouping(const Problem& p, int64_t* bits, int64_t* group, int64_t* tile) {
  *bits = p.attr_int("bits", 8), *group = p.attr_int("group", 32);
  require(*bits == 8 || *bits == 4, "bits 8 or 4");
  require(*group == 32 || *group == 64 || *group == 128, "group 32, 64 or 128");
  *tile = p.attr_int("tile", 1);
  require(*tile == 1 || *tile == 8, "tile 1 or 8");
  require(p.attr_int("pairs", 0) == 0, "no pairs, which are for GPUs");
}

QuantProblem decode_linear(const rm_problem& problem) {
  const Problem p(problem);
  QuantProblem q;
  read_grouping(p, &q.bits, &q.group, &q.tile);
  q.x_bits = p.attr_int("x_bits", 16);
  const View x = p.input(kX), w = p.input(kQ);
  require(x.rank() >= 2 && w.rank() == 2, "x of rank 2 or more and q of rank 2");
  // The gemm of the same operands: a stand-in for b takes part in the checks of shapes and folding.
  const int64_t n = w.dim(0), k = x.dim(-1);
  const int64_t shape[2] = {n, k}, stride[2] = {k, 1};
  rm_tensor b{};
  b.ndim = 2;
  b.dtype = problem.inputs[kX]->dtype;
  b.shape = const_cast<int64_t*>(shape);
  b.strides = const_cast<int64_t*>(stride);
  const auto optional = [&](size_t i) { return p.has_input(i) ? problem.inputs[i] : nullptr; };
  const rm_tensor* inputs[] = {problem.inputs[kX], &b, optional(kBiasIn), optional(kResidualIn)};
  rm_attr transposed{};
  transposed.struct_size = sizeof transposed;
  transposed.name = {"trans_b", 7};
  transposed.kind = RM_ATTR_INT;
  transposed.i = 1;
  const std::string_view activation = p.attr_string("activation", "none");
  rm_attr attrs[2] = {transposed, {}};
  attrs[1].struct_size = sizeof(rm_attr);
  attrs[1].name = {"activation", 10};
  attrs[1].kind = RM_ATTR_STRING;
  attrs[1].s = {activation.data(), activation.size()};
  const rm_problem gemm{sizeof(rm_problem),
                        {"gemm", 4},
                        inputs,
                        4,
                        problem.outputs,
                        problem.num_outputs,
                        attrs,
                        2,
                        sizeof(rm_attr),
                        0};
  q.gemm = gemm::decode(gemm);

  require(w.dtype == (q.bits == 8 ? DType::i8 : DType::u8), "q i8 (8 bits) or u8 (4 bits)");
  require(w.dim(1) == q.blocks() * 4 * q.bits, "rows of q padded to 64 elements");
  require(w.dim(1) <= 1 || w.step(1) == 1, "q dense along its rows");
  q.row_bytes = w.step(0);
  q.scale_row = grouped_row(p.input(kScale), n, q.groups());
  q.has_zero = p.has_input(kZero);
  require(q.x_bits == 16 || (q.x_bits == 8 && q.tile == 8), "x_bits 16, or 8 with tile 8");
  if (q.tile == 8) {
    require(!q.has_zero, "no zero points with tiles");
    require(n <= 1 || k == 0 || (q.row_bytes == w.dim(1) && q.scale_row == q.groups()),
            "dense tiles");
  }
  if (q.has_zero) q.zero_row = grouped_row(p.input(kZero), n, q.groups());
  return q;
}

}  // namespace rm::cpu::quant
