// The tables of small products: checks, costs and launches.
#include "_shim/alias_shim.hpp"
#include "small_gemm/kernels/small_gemm_any.cuh"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kMostTiles = 2048;        // of c: larger products have better kernels
constexpr std::int64_t kMostMultiplies = 1 << 25;
constexpr std::int64_t kMostK = 4096;

bool is_matrix(const Tensor& t) { return t.dtype == DType::f32 && t.rank == 2; }

template <class Shape = LargeTiles>
std::int64_t tiles_of(std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, Shape::kRows) * ceil_div(columns, Shape::kColumns);
}

/// Whether a card runs all the small tiles at once.
bool small_tiles_fit(std::int64_t rows, std::int64_t columns) {
  return tiles_of<SmallTiles>(rows, columns) <= 2 * std::max(1, multiprocessors());
}

double tiles_us(std::int64_t tiles, std::int64_t k) {
  const auto waves = static_cast<double>(ceil_div(tiles, 2 * std::max(1, multiprocessors())));
  return 1.5 + waves * (0.3 + static_cast<double>(k) / 256 * 0.7);
}

/// `row` and the other axis, K, of a matrix.
TileOperand operand_of(const Tensor& t, int row) {
  TileOperand o{};
  o.data = static_cast<const float*>(t.data), o.rows = static_cast<int>(t.shape[row]);
  const std::int64_t k = t.shape[1 - row];
  o.row_step = t.stride[row], o.k_step = t.stride[1 - row];
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  if (o.k_step == 1 && o.row_step % 4 == 0 && k % 4 == 0 && aligned) {
    o.read = TileRead::along_vectors;
  } else if (o.row_step == 1 && o.k_step % 4 == 0 && o.rows % 4 == 0 && aligned) {
    o.read = TileRead::across_vectors;
  } else {
    o.read = o.k_step <= o.row_step ? TileRead::along : TileRead::across;
  }
  return o;
}

/// c [M, N] of a, whose rows are axis `row_a`, and b, whose columns are axis `column_b`, in tiles of so
/// many columns.
SmallProduct product_of(const Tensor& a, int row_a, const Tensor& b, int column_b, const Tensor& c, int columns) {
  SmallProduct p{};
  p.a = operand_of(a, row_a), p.b = operand_of(b, column_b);
  p.c = static_cast<float*>(c.data), p.c_row = c.stride[0];
  p.k = static_cast<int>(a.shape[1 - row_a]);
  p.columns = static_cast<int>(ceil_div(c.shape[1], columns));
  return p;
}

template <class Shape, class... P, class Args>
Status launch_tiles(void (*kernel)(P...), std::int64_t blocks, std::int64_t k, const Args& args,
                    Stream stream) {
  const int depth = static_cast<int>(std::clamp<std::int64_t>(k, 1, kSmallDepth));
  if (Status s = allow_shared_memory("small_gemm", kernel, Shape::bytes(kSmallDepth)); !s) return s;
  return launch_overlapped("small_gemm", kernel, static_cast<unsigned>(blocks), kProductThreads,
                           static_cast<std::size_t>(Shape::bytes(depth)), stream, args);
}

ProductProgram program_of(const SmallGemm& p) {
  ProductProgram out{};
  out.operands = static_cast<int>(p.operands.size());
  out.steps = static_cast<int>(p.program.code.size());
  for (int i = 0; i < out.operands; ++i) {
    const Tensor& t = p.operands[static_cast<std::size_t>(i)];
    out.operand[i] = static_cast<const float*>(t.data);
    out.row_step[i] = t.stride[0], out.column_step[i] = t.stride[1];
  }
  for (int i = 0; i < out.steps; ++i) {
    const EwiseInstruction& from = p.program.code[static_cast<std::size_t>(i)];
    auto& to = out.step[i];
    to.opcode = static_cast<std::int16_t>(from.opcode);
    if (from.opcode == kConst) {
      to.imm = static_cast<float>(p.program.imm[static_cast<std::size_t>(from.a)]);
      continue;
    }
    const auto place = [&](int r) { return static_cast<std::int16_t>(r < 0 ? from.a : r); };
    to.a = place(from.a), to.b = place(from.b), to.c = place(from.c);
  }
  return out;
}

template <class Shape>
Status launch_shape(const SmallGemm& p, Stream stream) {
  SmallGemmArgs a{};
  a.product = product_of(p.a, 0, p.b, 1, p.c, Shape::kColumns);
  a.epilogue = epilogue_args(p.epilogue);
  a.program = program_of(p);
  const std::int64_t blocks = tiles_of<Shape>(p.c.shape[0], p.c.shape[1]);
  if (a.program.steps > 0) {
    return launch_tiles<Shape>(small_gemm_tiles<Shape, true>, blocks, a.product.k, a, stream);
  }
  return launch_tiles<Shape>(small_gemm_tiles<Shape, false>, blocks, a.product.k, a, stream);
}

Status launch_small(const SmallGemm& p, Workspace, Stream stream) {
  if (small_tiles_fit(p.c.shape[0], p.c.shape[1])) return launch_shape<SmallTiles>(p, stream);
  return launch_shape<LargeTiles>(p, stream);
}

const char* small_why_not(const SmallGemm& p) {
  const std::int64_t m = p.c.shape[0], n = p.c.shape[1], k = p.a.shape[1];
  if (tiles_of(m, n) > kMostTiles || m * n * k > kMostMultiplies || k > kMostK) return "a large product";
  return nullptr;
}

Status launch_slopes(const Slopes& p, Workspace, Stream stream) {
  SlopesArgs a{};
  std::int64_t blocks = 0, k = 0;
  for (const SlopeProduct& one : p.products) {
    if (numel(one.dw) == 0) continue;
    SmallProduct& to = a.product[a.count++];
    to = product_of(one.g, 1, one.x, 1, one.dw, LargeTiles::kColumns);
    to.sums = one.has_db ? static_cast<float*>(one.db.data) : nullptr;
    to.first_block = static_cast<int>(blocks);
    blocks += tiles_of(one.dw.shape[0], one.dw.shape[1]);
    k = std::max<std::int64_t>(k, to.k);
  }
  return blocks == 0 ? Status{} : launch_tiles<LargeTiles>(slopes_tiles, blocks, k, a, stream);
}

const char* slopes_why_not(const Slopes& p) {
  for (const SlopeProduct& one : p.products) {
    const std::int64_t n = one.dw.shape[0], k = one.dw.shape[1], m = one.g.shape[0];
    if (tiles_of(n, k) > kMostTiles || m * n * k > kMostMultiplies || m > kMostK) return "a large product";
    if (m == 0 || n == 0 || k == 0) return "an empty product";
  }
  return nullptr;
}

double slopes_us(const Slopes& p) {
  std::int64_t tiles = 0, deepest = 0;
  for (const SlopeProduct& one : p.products) {
    tiles += tiles_of(one.dw.shape[0], one.dw.shape[1]);
    deepest = std::max(deepest, one.g.shape[0]);
  }
  return tiles_us(tiles, deepest);
}

constexpr KernelRow<SmallGemm> kRows[] = {
    {"gemm_small_any", "small products of float32", small_why_not,
     [](const SmallGemm& p) { return tiles_us(tiles_of(p.c.shape[0], p.c.shape[1]), p.a.shape[1]); },
     launch_small},
};
constexpr KernelRow<Slopes> kSlopesRows[] = {
    {"slopes_tiles_any", "small products of float32", slopes_why_not, slopes_us, launch_slopes},
};

bool program_fits(const SmallGemm& p) {
  if (p.operands.size() > kMostSmallOperands || p.program.code.size() > kMostSmallInstructions) return false;
  const int registers = static_cast<int>(p.operands.size()) + 1;
  for (std::size_t i = 0; i < p.program.code.size(); ++i) {
    const EwiseInstruction& step = p.program.code[i];
    if (step.cls != 0) return false;
    const int most = step.opcode == kConst ? static_cast<int>(p.program.imm.size())
                                           : registers + static_cast<int>(i);
    for (int r : {step.a, step.b, step.c}) {
      if (r >= most) return false;
    }
    if (step.a < 0) return false;
  }
  return std::all_of(p.operands.begin(), p.operands.end(), [&](const Tensor& t) {
    return is_matrix(t) && same_shape(t, p.c);
  });
}

}  // namespace

std::span<const KernelRow<SmallGemm>> small_gemm_rows() { return kRows; }
std::span<const KernelRow<Slopes>> slopes_rows() { return kSlopesRows; }

Status legal(const SmallGemm& p) {
  const bool shapes = is_matrix(p.a) && is_matrix(p.b) && is_matrix(p.c) && p.c.stride[1] == 1 &&
                      p.a.shape[0] == p.c.shape[0] && p.b.shape[1] == p.c.shape[1] &&
                      p.a.shape[1] == p.b.shape[0] && p.a.shape[1] > 0 && p.epilogue.aux == nullptr;
  if (!shapes || !program_fits(p)) {
    return invalid(
        "[small_gemm] expected matrices of float32 that match, c with a dense last axis, and a "
        "program of float32 over operands like c, got others");
  }
  if (Status s = check_epilogue("small_gemm", p.epilogue, p.c); !s) return s;
  std::vector<Operand> operands{{"a", &p.a}, {"b", &p.b}, {"bias", p.epilogue.bias},
                                {"residual", p.epilogue.residual}};
  for (const Tensor& t : p.operands) operands.push_back({"an operand", &t});
  const Operand result{"c", &p.c};
  return check_memory("small_gemm", std::span(&result, 1), operands);
}

Status legal(const Slopes& p) {
  bool ok = !p.products.empty() && p.products.size() <= kMostSlopes;
  std::vector<Operand> results, operands;
  for (const SlopeProduct& one : p.products) {
    ok = ok && is_matrix(one.g) && is_matrix(one.x) && is_matrix(one.dw) && is_contiguous(one.dw) &&
         one.g.shape[0] == one.x.shape[0] && one.dw.shape[0] == one.g.shape[1] &&
         one.dw.shape[1] == one.x.shape[1];
    if (one.has_db) {
      ok = ok && one.db.dtype == DType::f32 && is_contiguous(one.db) && numel(one.db) == one.g.shape[1];
      results.push_back({"db", &one.db});
    }
    results.push_back({"dw", &one.dw});
    operands.insert(operands.end(), {{"g", &one.g}, {"x", &one.x}});
  }
  if (!ok) {
    return invalid(
        "[slopes] expected up to 12 pairs g [M, N] and x [M, K] of float32 with dense results "
        "[N, K] and [N], got others");
  }
  return check_memory("slopes", results, operands);
}

Status small_gemm(const SmallGemm& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.c) == 0) return {};
  const KernelRow<SmallGemm>* row = nullptr;
  if (Status s = select_row<SmallGemm>("small_gemm", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

Status slopes(const Slopes& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  const KernelRow<Slopes>* row = nullptr;
  if (Status s = select_row<Slopes>("slopes", kSlopesRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
