// quantize, and quant_linear by the modules gemv (few rows) and, on a dequantised copy, gemm.
#include <algorithm>
#include <limits>

#include "_shim/dispatch_shim.hpp"
#include "gemm/api.hpp"
#include "gemv/api.hpp"
#include "quant/api.hpp"
#include "rows/product.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

struct QuantizeOp {
  using Problem = cuda_ops::Quantize;
  static constexpr const char* kOp = "quantize";
  static constexpr rm_edge kEdges[] = {{'K', 0, 64}, {'K', 0, 128}};
  static auto rows() { return cuda_ops::quantize_rows(); }

  std::vector<Placed> tensors;
  Grouping grouping;

  explicit QuantizeOp(const rm_problem& raw) : grouping(Operands(raw)) {
    const Operands p(raw);
    if (p.has_output(2)) throw NotForModule("zero points");
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}, {p.output(1), 1, true}};
  }
  Problem problem(const Tensor* t) const {
    return {t[0], t[1], t[2], grouping.bits, grouping.group};
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::quantize(p, kernel, stream);
  }
};

/// x, q, scales, y, then bias and residual where given.
struct QuantProduct : Product {
  enum Place : size_t { kX, kQ, kScales, kY };

  Grouping grouping;
  int64_t n = 0, k = 0;

  explicit QuantProduct(const rm_problem& raw) : grouping(Operands(raw)) {
    const Operands p(raw);
    if (p.has_input(3)) throw NotForModule("zero points");
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.input(2), 2, false},
               {p.output(0), 0, true}};
    const Tensor &x = tensors[kX].tensor, &q = tensors[kQ].tensor;
    if (x.rank < 2 || q.rank != 2 || tensors[kScales].tensor.rank != 2) {
      throw NotForModule("x, the weight or its scales are no matrix");
    }
    n = q.shape[0], k = x.shape[x.rank - 1];
    if (n == 0 || k == 0) throw NotForModule("an empty weight");
    place_epilogue(p, {1, 2}, 4, 5);
  }
};

/// Few rows of x; a row of q is read where it lies, without its padding.
struct QuantGemvOp : QuantProduct {
  using Problem = cuda_ops::Gemv;
  static constexpr const char* kOp = "quant_linear";
  static constexpr rm_edge kEdges[] = {{'M', 0, 8}, {'N', 0, 128}, {'K', 0, 512}};
  static auto rows() { return cuda_ops::gemv_rows(); }

  explicit QuantGemvOp(const rm_problem& raw) : QuantProduct(raw) {
    fold_few_rows();
    grouping.strip_padding(tensors[kQ].tensor, k);
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[kX], p.w = t[kQ], p.y = t[kY], p.scales = &t[kScales];
    p.epilogue = with_addresses(t);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv(p, kernel, stream);
  }
};

/// A product whose weight is dequantised, some rows at a time, before gemm reads it.
struct Dequantised {
  Tensor x, q, scales, y;  // x and y as matrices
  cuda_ops::Epilogue epilogue;
  Tensor residual;         // as a matrix; epilogue.residual only says that there is one
  int bits = 8, group = 128;
  int64_t n = 0, k = 0;
  bool folds = true;       // leading axes are rows of one pitch
};

/// Rows of the weight in a piece, whole tiles of gemm: what was written is still in a large cache
/// when it is read, and the workspace of a head of 128 thousand words stays small.
constexpr int64_t kPieceBytes = 64 << 20, kPieceRows = 256;
/// Stands for the workspace while a problem is planned.
void* const kPlanned = reinterpret_cast<void*>(int64_t{64} << 40);

int64_t rows_of_piece(const Dequantised& p) {
  const int64_t row = cuda_ops::quant_padded(p.k) * cuda_ops::size_of(p.x.dtype);
  const int64_t rows = std::max(kPieceRows, kPieceBytes / row / kPieceRows * kPieceRows);
  return std::min(rows, p.n);
}

/// Columns from `begin` on of a matrix, so many of them.
Tensor columns_of(Tensor t, int64_t begin, int64_t count) {
  t.data = static_cast<char*>(t.data) + begin * cuda_ops::size_of(t.dtype);
  t.shape[t.rank - 1] = count;
  return t;
}

/// One piece: a gemm that reads its part of the weight at `data`. Pointers of the epilogue are into
/// `parts`.
struct Piece {
  Tensor bias, residual;
  cuda_ops::Gemm gemm;

  Piece(const Dequantised& p, int64_t begin, int64_t count, void* data) {
    gemm.a = p.x, gemm.c = columns_of(p.y, begin, count);
    gemm.b = {data, p.x.dtype, 2, {count, p.k}, {cuda_ops::quant_padded(p.k), 1}};
    gemm.trans_b = true;
    gemm.epilogue = p.epilogue;
    if (p.epilogue.bias != nullptr) {
      bias = columns_of(*p.epilogue.bias, begin, count);
      gemm.epilogue.bias = &bias;
    }
    if (p.epilogue.residual != nullptr) {
      residual = columns_of(p.residual, begin, count);
      gemm.epilogue.residual = &residual;
    }
    gemm.library = &gemm_library();
  }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
};

std::size_t aligned_bytes(std::size_t bytes) {
  constexpr std::size_t kTo = cuda_ops::kWorkspaceAlignment;
  return (bytes + kTo - 1) / kTo * kTo;
}

/// Of the part of the weight, at the front of the workspace.
std::size_t part_bytes(const Dequantised& p) {
  return aligned_bytes(static_cast<std::size_t>(rows_of_piece(p) * cuda_ops::quant_padded(p.k) *
                                                cuda_ops::size_of(p.x.dtype)));
}

/// q and scales of `count` rows; the scales of a piece lie between those of others.
cuda_ops::Dequantize part_of(const Dequantised& p, int64_t begin, int64_t count, void* data) {
  cuda_ops::Dequantize d;
  d.bits = p.bits, d.group = p.group;
  d.q = p.q;
  d.q.data = static_cast<char*>(p.q.data) + begin * p.q.shape[1];
  d.q.shape[0] = count;
  d.scales = columns_of(p.scales, begin, count);
  d.y = {data, p.x.dtype, 2, {count, p.k}, {cuda_ops::quant_padded(p.k), 1}};
  return d;
}

cuda_ops::Status legal(const Dequantised& p) {
  if (!p.folds) return cuda_ops::invalid("[quant_linear] expected rows of one pitch, got others");
  const int64_t count = rows_of_piece(p);
  if (cuda_ops::Status s = cuda_ops::legal(part_of(p, 0, count, kPlanned)); !s) return s;
  // The whole product's check also covers y, bias and residual as they are.
  const Piece whole(p, 0, p.n, kPlanned);
  return cuda_ops::legal(whole.gemm);
}

/// Bytes of the products' own; the last piece may be smaller.
std::size_t product_bytes(const Dequantised& p) {
  const int64_t count = rows_of_piece(p), last = p.n % count;
  std::size_t bytes = cuda_ops::gemm_workspace(Piece(p, 0, count, kPlanned).gemm);
  if (last != 0) {
    bytes = std::max(bytes, cuda_ops::gemm_workspace(Piece(p, p.n - last, last, kPlanned).gemm));
  }
  return bytes;
}

cuda_ops::Status launch_dequantised(const Dequantised& p, cuda_ops::Workspace space,
                                    cudaStream_t stream) {
  const std::size_t front = part_bytes(p);
  cuda_ops::Status s = cuda_ops::check_workspace("quant_linear", front, space, "workspace()");
  if (!s) return s;
  const cuda_ops::Workspace rest{static_cast<char*>(space.data) + front, space.bytes - front};
  const int64_t step = rows_of_piece(p);
  for (int64_t begin = 0; begin < p.n; begin += step) {
    const int64_t count = std::min(step, p.n - begin);
    if (s = cuda_ops::dequantize(part_of(p, begin, count, space.data), stream); !s) return s;
    const Piece piece(p, begin, count, space.data);
    if (s = cuda_ops::gemm(piece.gemm, "", rest, stream); !s) return s;
  }
  return {};
}

/// The fastest of gemm's rows, behind writing and reading the weight.
double dequantised_us(const Dequantised& p) {
  const Piece whole(p, 0, p.n, kPlanned);
  double product = std::numeric_limits<double>::max();
  for (const auto& row : cuda_ops::gemm_rows()) {
    if (row.why_not(whole.gemm) == nullptr) product = std::min(product, row.cost_us(whole.gemm));
  }
  const auto elements = static_cast<double>(p.n) * static_cast<double>(p.k);
  const double bytes = elements * (p.bits / 8.0 + 2.0 * cuda_ops::size_of(p.x.dtype));
  return product + cuda_ops::move_us(bytes);
}

constexpr cuda_ops::KernelRow<Dequantised> kDequantisedRows[] = {
    {"quant_linear_dequantised_any", "any rows of x", [](const Dequantised&) -> const char* { return nullptr; },
     dequantised_us, launch_dequantised},
};

struct DequantisedOp : QuantProduct {
  using Problem = Dequantised;
  static constexpr const char* kOp = "quant_linear";
  static constexpr rm_edge kEdges[] = {{'M', 0, 8}, {'M', 0, 128}, {'N', 0, 256}, {'K', 0, 128}};
  static std::span<const cuda_ops::KernelRow<Problem>> rows() { return kDequantisedRows; }
  using QuantProduct::QuantProduct;

  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[kX], p.q = t[kQ], p.scales = t[kScales], p.y = t[kY];
    p.epilogue = with_addresses(t);
    p.folds = cuda_ops::fold_rows(p.x) && cuda_ops::fold_rows(p.y);
    if (residual >= 0) {
      p.residual = t[residual];
      p.folds = cuda_ops::fold_rows(p.residual) && p.folds;
    }
    p.bits = grouping.bits, p.group = grouping.group, p.n = n, p.k = k;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return part_bytes(p) + product_bytes(p); }
  static cuda_ops::Status run(const Problem& p, const char*, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return launch_dequantised(p, space, stream);
  }
};

}  // namespace

void add_quant_rows(std::vector<rm_kernel>& out) {
  Row<QuantizeOp>::add(out);
  Row<QuantGemvOp>::add(out);
  Row<DequantisedOp>::add(out);
}

}  // namespace rm::cuda
