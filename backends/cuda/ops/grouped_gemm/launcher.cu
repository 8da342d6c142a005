// The table of grouped_gemm: checks, choice and launches.
#include <algorithm>

#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "grouped_gemm/api.hpp"
#include "grouped_gemm/kernels/grouped_mma_sm80.cuh"
#include "grouped_gemm/kernels/grouped_rows_any.cuh"
#include "grouped_gemm/kernels/grouped_tiled_any.cuh"

namespace rm::cuda_ops {
namespace {

GroupedArgs args_of(const GroupedGemm& p) {
  GroupedArgs a{};
  a.x = p.x.data, a.w = p.w.data, a.offsets = p.offsets.data, a.y = p.y.data;
  a.wide = p.offsets.dtype == DType::i64;
  a.rows = p.x.shape[0], a.depth = p.x.shape[1], a.columns = p.w.shape[2], a.groups = p.w.shape[0];
  a.x_row = p.x.stride[0], a.x_column = p.x.stride[1];
  a.w_group = p.w.stride[0], a.w_row = p.w.stride[1], a.w_column = p.w.stride[2];
  a.offset_step = p.offsets.stride[0];
  a.y_row = p.y.stride[0], a.y_column = p.y.stride[1];
  return a;
}

std::int64_t tiles_of(const GroupedGemm& p, int rows) {
  return grouped_tiles_at_most(p.x.shape[0], p.w.shape[0], rows);
}

dim3 blocks_for(const GroupedGemm& p, int rows, int columns) {
  return dim3(static_cast<unsigned>(tiles_of(p, rows)),
              static_cast<unsigned>(std::min<std::int64_t>(ceil_div(p.w.shape[2], columns), 65535)));
}

Status launch_rows(const GroupedGemm& p, Workspace, Stream stream) {
  return dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_overlapped("grouped_gemm", grouped_rows<T>,
                             blocks_for(p, kGroupedFew, kGroupedWarps * kGroupedColumns),
                             32 * kGroupedWarps, 0, stream, args_of(p));
  });
}

Status launch_tiled(const GroupedGemm& p, Workspace, Stream stream) {
  return dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_overlapped("grouped_gemm", grouped_tiled<T>,
                             blocks_for(p, kGroupedTile, kGroupedTile), 256, 0, stream, args_of(p));
  });
}

template <class T, bool kDeep>
Status launch_mma_of(const GroupedGemm& p, Stream stream) {
  const auto kernel = grouped_mma<T, kDeep>;
  if (Status s = allow_shared_memory("grouped_gemm", kernel, kMmaShared); !s) return s;
  return launch_overlapped("grouped_gemm", kernel, blocks_for(p, kMmaRows, kMmaColumns), 256,
                           kMmaShared, stream, args_of(p));
}

Status launch_mma(const GroupedGemm& p, Workspace, Stream stream) {
  const bool deep = p.w.stride[1] == 1;
  if (p.x.dtype == DType::bf16) {
    return deep ? launch_mma_of<__nv_bfloat16, true>(p, stream)
                : launch_mma_of<__nv_bfloat16, false>(p, stream);
  }
  return deep ? launch_mma_of<__half, true>(p, stream) : launch_mma_of<__half, false>(p, stream);
}

constexpr const char* kNoVectors = "rows are not whole 16-byte vectors on 16 bytes";

/// Whether x's rows and the matrices' rows or columns, of which `axis` is the dense axis, are vectors.
bool has_vectors(const GroupedGemm& p, int axis) {
  const int vector = 16 / size_of(p.x.dtype), other = 3 - axis;
  return p.x.stride[1] == 1 && is_aligned(p.x.data, p.x.stride[0], p.x.dtype, 16) &&
         p.w.stride[axis] == 1 && p.w.shape[axis] % vector == 0 && p.x.shape[1] % vector == 0 &&
         is_aligned(p.w.data, p.w.stride[0], p.w.dtype, 16) && p.w.stride[other] % vector == 0;
}

const char* rows_why_not(const GroupedGemm& p) {
  if (p.w.stride[1] != 1) return "the depth is not the dense axis";
  return has_vectors(p, 1) ? nullptr : kNoVectors;
}

const char* mma_why_not(const GroupedGemm& p) {
  if (size_of(p.x.dtype) != 2) return "it is for 16-bit types";
  if (!has_vectors(p, p.w.stride[1] == 1 ? 1 : 2)) return kNoVectors;
  if (const char* why = sm80_why_not()) return why;
  return shared_why_not(kMmaShared);
}

/// Bytes of the matrices that groups with rows have, at most, and of the rows.
double bytes_of(const GroupedGemm& p) {
  const double used = static_cast<double>(std::min(p.w.shape[0], p.x.shape[0]));
  const double matrix = static_cast<double>(p.w.shape[1]) * static_cast<double>(p.w.shape[2]);
  return size_of(p.x.dtype) *
         (used * matrix + static_cast<double>(numel(p.x)) + static_cast<double>(numel(p.y)));
}

/// Microseconds that `rows` rows times a matrix each take at `rate` multiply-adds of the measured card a
/// microsecond, or that the memory takes.
double product_us(const GroupedGemm& p, double rows, double rate) {
  const double matrix = static_cast<double>(p.w.shape[1]) * static_cast<double>(p.w.shape[2]);
  return std::max(move_us(bytes_of(p)), 2 + rows * matrix / compute_rate(rate));
}

double rows_of(const GroupedGemm& p, int tile) {
  return static_cast<double>(tiles_of(p, tile)) * tile;
}

/// What a block's way along the depth takes, however few blocks there are.
double alone_us(const GroupedGemm& p, int depth, double step_us) {
  return step_us * static_cast<double>(ceil_div(p.x.shape[1], depth));
}

constexpr KernelRow<GroupedGemm> kRows[] = {
    {"grouped_gemm_mma_sm80", "16-bit types whose rows are whole 16-byte vectors", mma_why_not,
     [](const GroupedGemm& p) {
       return alone_us(p, kMmaDepth, 0.15) + product_us(p, rows_of(p, kMmaRows), 1.2e8);
     },
     launch_mma},
    {"grouped_gemm_rows_any", "few rows a group, the depth dense in 16-byte vectors", rows_why_not,
     [](const GroupedGemm& p) {
       return product_us(p, static_cast<double>(p.x.shape[0]), 8e6);
     },
     launch_rows},
    {"grouped_gemm_tiled_any", "any problem",
     [](const GroupedGemm&) -> const char* { return nullptr; },
     [](const GroupedGemm& p) {
       return alone_us(p, kGroupedDepth, 0.3) + product_us(p, rows_of(p, kGroupedTile), 6e6);
     },
     launch_tiled},
};

bool shapes_agree(const GroupedGemm& p) {
  return p.x.rank == 2 && p.w.rank == 3 && p.offsets.rank == 1 && p.y.rank == 2 &&
         p.w.shape[1] == p.x.shape[1] && p.offsets.shape[0] == p.w.shape[0] &&
         p.y.shape[0] == p.x.shape[0] && p.y.shape[1] == p.w.shape[2] &&
         p.x.shape[0] < std::int64_t{1} << 31;
}

}  // namespace

std::span<const KernelRow<GroupedGemm>> grouped_gemm_rows() { return kRows; }

Status legal(const GroupedGemm& p) {
  const bool ids = p.offsets.dtype == DType::i32 || p.offsets.dtype == DType::i64;
  if (!is_float(p.x.dtype) || p.w.dtype != p.x.dtype || p.y.dtype != p.x.dtype || !ids ||
      !shapes_agree(p)) {
    return invalid(
        "[grouped_gemm] expected x [S, K], w [E, K, N] and y [S, N] of one of float32, bfloat16 and "
        "float16, offsets [E] of int32 or int64 and fewer than 2^31 rows, got others");
  }
  return check_memory("grouped_gemm", {{"y", &p.y}},
                      {{"x", &p.x}, {"w", &p.w}, {"offsets", &p.offsets}});
}

Status grouped_gemm(const GroupedGemm& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<GroupedGemm>* row = nullptr;
  if (Status s = select_row<GroupedGemm>("grouped_gemm", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
