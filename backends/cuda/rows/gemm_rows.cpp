// gemm by the modules gemm and, for few rows, gemv; linears by gemv's groups.
#include "_shim/dispatch_shim.hpp"
#include "gemm/api.hpp"
#include "gemv/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Activation;
using cuda_ops::BiasKind;
using cuda_ops::Tensor;

/// Swaps the last two axes of a matrix whose rows are not dense but whose columns are.
bool turned(Tensor& t) {
  const int last = t.rank - 1;
  const bool dense = t.shape[last] <= 1 || t.stride[last] == 1;
  if (dense || t.stride[last - 1] != 1) return false;
  std::swap(t.shape[last], t.shape[last - 1]);
  std::swap(t.stride[last], t.stride[last - 1]);
  return true;
}

/// The operands of the operator: a, b, c, then bias and residual where given.
struct Product {
  std::vector<Placed> tensors;
  bool trans_a = false, trans_b = false;
  int bias = -1, residual = -1;  // in `tensors`
  bool stable = false;           // b and the bias are weights
  cuda_ops::Epilogue epilogue;

  explicit Product(const rm_problem& raw) {
    const Operands p(raw);
    stable = p.is_constant(1) && (!p.has_input(2) || p.is_constant(2));
    Tensor a = p.input(0), b = p.input(1);
    const Tensor c = p.output(0);
    if (a.rank < 2 || b.rank < 2 || c.rank < 2) throw NotForModule("an operand is no matrix");
    trans_a = turned(a);
    trans_b = (p.attr_int("trans_b", 1) != 0) != turned(b);
    tensors = {{a, 0, false}, {b, 1, false}, {c, 0, true}};
    if (p.has_input(2)) {
      bias = static_cast<int>(tensors.size());
      tensors.push_back({p.input(2), 2, false});
    }
    if (p.has_input(3)) {
      residual = static_cast<int>(tensors.size());
      tensors.push_back({p.input(3), 3, false});
    }
    epilogue.bias_kind = bias >= 0 ? BiasKind::column : BiasKind::none;
    epilogue.activation = activation_of(p.attr_string("activation", "none"));
    epilogue.scale = static_cast<float>(p.attr_float("alpha", 1.0));
  }

  cuda_ops::Epilogue with_addresses(const Tensor* t) const {
    cuda_ops::Epilogue e = epilogue;
    if (bias >= 0) e.bias = &t[bias];
    if (residual >= 0) e.residual = &t[residual];
    return e;
  }
};

struct GemmOp : Product {
  using Problem = cuda_ops::Gemm;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 128}, {'N', 0, 256}, {'K', 0, 128}};
  static auto rows() { return cuda_ops::gemm_rows(); }
  using Product::Product;

  Problem problem(const Tensor* t) const {
    Problem p;
    p.a = t[0], p.b = t[1], p.c = t[2];
    p.trans_a = trans_a, p.trans_b = trans_b;
    p.epilogue = with_addresses(t);
    p.library = &gemm_library();
    return p;
  }
  // The table counts multiplications alone: few rows are bounded by reading b.
  static double least_us(const Problem& p) {
    const int64_t elements = cuda_ops::numel(p.a) + cuda_ops::numel(p.b) + cuda_ops::numel(p.c);
    return cuda_ops::move_us(static_cast<double>(elements) * cuda_ops::size_of(p.c.dtype));
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::gemm_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::gemm(p, kernel, space, stream);
  }
};

/// Few rows of x times a weight matrix [N, K]: leading axes become rows.
struct GemvOp : Product {
  using Problem = cuda_ops::Gemv;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 8}, {'N', 0, 128}, {'K', 0, 512}};
  static constexpr int64_t kMostRowsOfX = 8;
  static auto rows() { return cuda_ops::gemv_rows(); }

  explicit GemvOp(const rm_problem& raw) : Product(raw) {
    if (trans_a || !trans_b || tensors[1].tensor.rank != 2) {
      throw NotForModule("the weight is no matrix [N, K]");
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (i == 1 || static_cast<int>(i) == bias) continue;
      Tensor& t = tensors[i].tensor;
      const cuda_ops::Rows r = cuda_ops::rows_of(t);
      if (!r.valid) throw NotForModule("rows are not of one pitch");
      if (r.rows > kMostRowsOfX || r.rows < 1) throw NotForModule("not 1 to 8 rows");
      t.rank = 2;
      t.shape[0] = r.rows, t.shape[1] = r.n;
      t.stride[0] = r.pitch, t.stride[1] = 1;
    }
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[0], p.w = t[1], p.y = t[2];
    p.epilogue = with_addresses(t);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv(p, kernel, stream);
  }
};

/// Several weights against one row, which may be normalised on its way.
struct LinearsOp {
  using Problem = cuda_ops::GemvGroup;
  static constexpr const char* kOp = "linears";
  // So many rows, in two weights, are more than one turn of a large card's blocks.
  static constexpr rm_edge kEdges[] = {{'N', 0, 1088}, {'K', 0, 128}};
  static constexpr size_t kFirst = 3, kMost = 3;  // operands: x, norm, residual, then w and bias each
  /// Plans use the first alone: where it does not serve, single products do better than the other,
  /// which is for operands that turn out to lie on odd addresses.
  static auto rows() { return cuda_ops::gemv_group_rows().first(1); }

  std::vector<Placed> tensors;
  bool stable = true;
  cuda_ops::GemvGroup given;  // without tensors
  int norm = -1, residual = -1, bias[kMost] = {-1, -1, -1};

  explicit LinearsOp(const rm_problem& raw) {
    const Operands p(raw);
    const auto add = [&](Tensor t, size_t index, bool result) {
      tensors.push_back({t, index, result});
      return static_cast<int>(tensors.size()) - 1;
    };
    const auto row = [](Tensor t) {
      const cuda_ops::Rows r = cuda_ops::rows_of(t);
      if (!r.valid || r.rows != 1) throw NotForModule("not one row");
      t.rank = 2, t.shape[0] = 1, t.shape[1] = r.n, t.stride[0] = r.n, t.stride[1] = 1;
      return t;
    };
    const auto weight = [&](size_t index) {
      stable = stable && p.is_constant(index);
      const Tensor t = p.input(index);  // copied before every launch it would cost more than it gives
      if (!cuda_ops::is_contiguous(t)) throw NotForModule("a weight has gaps");
      return add(t, index, false);
    };
    given.gated = p.attr_int("gated", 0) != 0;
    given.activation = activation_of(p.attr_string("activation", "none"));
    given.eps = static_cast<float>(p.attr_float("eps", 1e-5));
    given.weight_offset = static_cast<float>(p.attr_float("weight_offset", 0.0));
    given.count = 0;
    while (given.count < static_cast<int>(kMost) && p.has_input(kFirst + 2 * given.count)) {
      ++given.count;
    }
    add(row(p.input(0)), 0, false);
    for (int i = 0; i < given.count; ++i) weight(kFirst + 2 * static_cast<size_t>(i));
    for (int i = 0; i < (given.gated ? 1 : given.count); ++i) {
      add(row(p.output(static_cast<size_t>(i))), static_cast<size_t>(i), true);
    }
    if (p.has_input(1)) norm = weight(1);
    if (p.has_input(2)) residual = add(row(p.input(2)), 2, false);
    for (int i = 0; i < given.count; ++i) {
      const size_t index = kFirst + 1 + 2 * static_cast<size_t>(i);
      if (p.has_input(index)) bias[i] = weight(index);
    }
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0];
    for (int i = 0; i < p.count; ++i) {
      p.w[i] = t[1 + i];
      if (bias[i] >= 0) p.bias[i] = &t[bias[i]];
      if (!p.gated || i == 0) p.y[i] = t[1 + p.count + i];
    }
    if (norm >= 0) p.norm = &t[norm];
    if (residual >= 0) p.residual = &t[residual];
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv_group(p, kernel, stream);
  }
};

}  // namespace

cuda_ops::GemmLibrary& gemm_library() {
  static cuda_ops::GemmLibrary& found = *new cuda_ops::GemmLibrary({});
  return found;
}

void add_gemm_rows(std::vector<rm_kernel>& out) {
  Row<LinearsOp>::add(out);
  Row<GemvOp>::add(out);
  Row<GemmOp>::add(out);
}

}  // namespace rm::cuda
