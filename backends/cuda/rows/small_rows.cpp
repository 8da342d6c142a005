// Small products of float32: gemm, a product that goes on by an element-wise program (gemm_ewise), and
// the slopes of several products in one launch (slopes).
#include "rows/product.hpp"
#include "small_gemm/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

/// a and b [K, N] of gemm's attributes as matrices.
Tensor right_operand(const Operands& p) {
  Tensor b = p.input(1);
  if (b.rank == 2 && p.attr_int("trans_b", 1) != 0) {
    std::swap(b.shape[0], b.shape[1]);
    std::swap(b.stride[0], b.stride[1]);
  }
  return b;
}

struct SmallGemmOp : Product {
  using Problem = cuda_ops::SmallGemm;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 16}, {'N', 0, 32}, {'K', 0, 256}};
  static auto rows() { return cuda_ops::small_gemm_rows(); }

  explicit SmallGemmOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {right_operand(p), 1, false}, {p.output(0), 0, true}};
    place_epilogue(p, {1}, 2, 3);
    epilogue.scale = static_cast<float>(p.attr_float("alpha", 1.0));
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.a = t[0], p.b = t[1], p.c = t[2];
    p.epilogue = with_addresses(t);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::small_gemm(p, kernel, stream);
  }
};

/// a, b, then the program's operands -> c.
struct GemmEwiseOp {
  using Problem = cuda_ops::SmallGemm;
  static constexpr const char* kOp = "gemm_ewise";
  static constexpr rm_edge kEdges[] = {{'M', 0, 16}, {'N', 0, 32}, {'K', 0, 256}};
  static constexpr size_t kFields = 5;  // of an instruction
  static auto rows() { return cuda_ops::small_gemm_rows(); }

  std::vector<Placed> tensors;  // a, b, c, the others
  cuda_ops::EwiseProgram program;

  explicit GemmEwiseOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {right_operand(p), 1, false}, {p.output(0), 0, true}};
    for (size_t i = 2; i < p.num_inputs(); ++i) tensors.push_back({p.input(i), i, false});
    if (tensors.size() > kMostTensors) throw NotForModule("too many operands");
    const std::vector<int64_t> code = p.attr_ints("code");
    if (code.empty() || code.size() % kFields != 0) throw NotForModule("the program is not whole");
    for (size_t i = 0; i < code.size(); i += kFields) {
      const auto field = [&](size_t k) { return static_cast<int>(code[i + k]); };
      program.code.push_back({field(0), field(1), field(2), field(3), field(4)});
    }
    program.imm = p.attr_floats("imm");
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.a = t[0], p.b = t[1], p.c = t[2];
    p.program = program;
    p.operands.assign(t + 3, t + tensors.size());
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::small_gemm(p, kernel, stream);
  }
};

/// g, x of each product -> dw, db? of each.
struct SlopesOp {
  using Problem = cuda_ops::Slopes;
  static constexpr const char* kOp = "slopes";
  static constexpr rm_edge kEdges[] = {{'M', 0, 256}, {'N', 0, 16}, {'K', 0, 32}};
  static constexpr size_t kTensors = 4 * cuda_ops::kMostSlopes;
  static auto rows() { return cuda_ops::slopes_rows(); }

  std::vector<Placed> tensors;  // g, x, dw, db where wanted, of each
  std::vector<bool> has_db;

  explicit SlopesOp(const rm_problem& raw) {
    const Operands p(raw);
    const size_t count = p.num_inputs() / 2;
    if (count > cuda_ops::kMostSlopes) throw NotForModule("more than 12 products");
    for (size_t k = 0; k < count; ++k) {
      tensors.push_back({p.input(2 * k), 2 * k, false});
      tensors.push_back({p.input(2 * k + 1), 2 * k + 1, false});
      tensors.push_back({p.output(2 * k), 2 * k, true});
      has_db.push_back(p.has_output(2 * k + 1));
      if (has_db.back()) tensors.push_back({p.output(2 * k + 1), 2 * k + 1, true});
    }
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    for (const bool db : has_db) {
      p.products.push_back({t[0], t[1], t[2], db ? t[3] : Tensor{}, db});
      t += db ? 4 : 3;
    }
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::slopes(p, kernel, stream);
  }
};

}  // namespace

void add_small_rows(std::vector<rm_kernel>& out) {
  Row<SmallGemmOp>::add(out);
  Row<GemmEwiseOp>::add(out);
  Row<SlopesOp>::add(out);
}

}  // namespace rm::cuda
