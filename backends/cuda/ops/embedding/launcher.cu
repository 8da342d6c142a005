// The tables of embedding: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/walk_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "embedding/api.hpp"
#include "embedding/kernels/embedding_any.cuh"

namespace rm::cuda_ops {
namespace {

inline constexpr std::int64_t kMostAtOnce = 0x7fff0000;  // of a launch, what counters hold

bool legal_ids(const Tensor& ids, bool dense) {
  if (ids.dtype != DType::i32 && ids.dtype != DType::i64) return false;
  return is_contiguous(ids) || (!dense && walk_of<1>({&ids}).rank <= 2);
}

Status check(const Tensor& table, const Tensor& ids, const Tensor& rows, bool dense_table) {
  if (table.rank != 2 || !is_float(table.dtype) || table.shape[1] > kMostAtOnce ||
      (table.shape[1] > 1 && table.stride[1] != 1) || (dense_table && !is_contiguous(table))) {
    return invalid(
        "[embedding] expected a table [V, N] of float32, bfloat16 or float16 with dense "
        "rows, got " +
        std::string(name_of(table.dtype)) + " of rank " + std::to_string(table.rank));
  }
  bool like = rows.rank == ids.rank + 1 && rows.dtype == table.dtype && is_contiguous(rows) &&
              rows.shape[rows.rank - 1] == table.shape[1];
  for (int d = 0; like && d < ids.rank; ++d) like = rows.shape[d] == ids.shape[d];
  if (!legal_ids(ids, dense_table) || !like) {
    return invalid(
        "[embedding] expected ids [*] of int32 or int64 (dense, forward also with two strides) and dense rows [*, N] of the "
        "table's dtype, got " +
        std::string(name_of(ids.dtype)) + " and " + name_of(rows.dtype));
  }
  return {};
}

Status check_flag(const Tensor* flag) {
  if (flag == nullptr || (flag->dtype == DType::i32 && numel(*flag) == 1)) return {};
  return invalid("[embedding] expected out_of_range of one int32, got " +
                 std::to_string(numel(*flag)) + " of " + name_of(flag->dtype));
}

EmbeddingArgs forward_args(const EmbeddingForward& p) {
  EmbeddingArgs a{};
  a.table = p.table.data, a.ids = p.ids.data, a.y = p.y.data;
  a.count = numel(p.ids), a.vocabulary = p.table.shape[0], a.n = static_cast<int>(p.table.shape[1]);
  a.table_pitch = p.table.stride[0], a.wide_ids = p.ids.dtype == DType::i64;
  if (p.out_of_range) a.out_of_range = static_cast<int*>(p.out_of_range->data);
  if (!is_contiguous(p.ids)) {
    const Walk<1> w = walk_of<1>({&p.ids});
    a.ids_inner = w.rank > 0 ? w.shape[w.rank - 1] : 1;
    a.ids_inner_step = w.rank > 0 ? w.stride[0][w.rank - 1] : 0;
    a.ids_outer_step = w.rank > 1 ? w.stride[0][0] : 0;
  }
  return a;
}

template <bool kVector>
Status launch_forward(const EmbeddingForward& p, Workspace, Stream stream) {
  EmbeddingArgs a = forward_args(p);
  return dispatch_float(p.table.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    constexpr int V = kVector ? 16 / static_cast<int>(sizeof(T)) : 1;
    a.by_row = FastDivisor(static_cast<std::uint32_t>(a.n / V));
    const std::int64_t count = a.count, at_once = kMostAtOnce / (a.n / V);
    for (std::int64_t first = 0; first < count; first += at_once) {
      a.count = std::min(at_once, count - first);
      if (a.ids_inner > 0) {
        a.first = first;
      } else {
        a.ids = static_cast<const char*>(p.ids.data) + first * size_of(p.ids.dtype);
      }
      a.y = static_cast<T*>(p.y.data) + first * a.n;
      const std::int64_t packs = a.count * (a.n / V);
      const auto blocks = static_cast<unsigned>(ceil_div(packs, 256 * kEmbeddingPacks));
      if (Status s = launch_overlapped("embedding", embedding_rows<T, V>, blocks, 256, 0, stream, a);
          !s) {
        return s;
      }
    }
    return {};
  });
}

const char* vector_why_not(const EmbeddingForward& p) {
  if (p.table.shape[1] * size_of(p.table.dtype) % 16 != 0) return "rows are not whole vectors";
  if (!is_aligned(p.table.data, p.table.stride[0], p.table.dtype, 16))
    return "rows are not aligned";
  return is_aligned(p.y.data, 0, p.y.dtype, 16) ? nullptr : "y is not aligned";
}

double forward_cost(const EmbeddingForward& p, double factor) {
  return factor * move_us(2.0 * static_cast<double>(numel(p.y)) * size_of(p.y.dtype));
}

constexpr KernelRow<EmbeddingForward> kForward[] = {
    {"embedding_vector_sm80", "rows of whole 16-byte vectors", vector_why_not,
     [](const EmbeddingForward& p) { return forward_cost(p, 1); }, launch_forward<true>},
    {"embedding_naive_any", "any problem",
     [](const EmbeddingForward&) -> const char* { return nullptr; },
     [](const EmbeddingForward& p) { return forward_cost(p, 3); }, launch_forward<false>},
};

Status launch_backward(const EmbeddingBackward& p, Workspace workspace, Stream stream) {
  EmbeddingArgs a{};
  a.table = p.dy.data, a.ids = p.ids.data, a.y = p.dtable.data;
  a.count = numel(p.ids), a.vocabulary = p.dtable.shape[0];
  a.n = static_cast<int>(p.dtable.shape[1]), a.wide_ids = p.ids.dtype == DType::i64;
  a.head = static_cast<int*>(workspace.data), a.next = a.head + a.count;
  if (p.out_of_range) a.out_of_range = static_cast<int*>(p.out_of_range->data);
  embedding_links<<<static_cast<unsigned>(ceil_div(a.count, 8)), 256, 0, stream>>>(a);
  dispatch_float(p.dtable.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    embedding_sums<T><<<static_cast<unsigned>(a.count), 256, 0, stream>>>(a);
  });
  return launch_status("embedding");
}

constexpr KernelRow<EmbeddingBackward> kBackward[] = {
    {"embedding_lists_any", "any problem; time grows with the square of the ids' number",
     [](const EmbeddingBackward&) -> const char* { return nullptr; },
     [](const EmbeddingBackward& p) {
       return move_us(2.0 * static_cast<double>(numel(p.dtable)) * size_of(p.dtable.dtype));
     },
     launch_backward},
};

}  // namespace

std::span<const KernelRow<EmbeddingForward>> embedding_forward_rows() { return kForward; }
std::span<const KernelRow<EmbeddingBackward>> embedding_backward_rows() { return kBackward; }

Status legal(const EmbeddingForward& p) {
  if (Status s = check(p.table, p.ids, p.y, false); !s) return s;
  if (Status s = check_flag(p.out_of_range); !s) return s;
  return check_memory("embedding", {{"y", &p.y}, {"out_of_range", p.out_of_range}},
                      {{"table", &p.table}, {"ids", &p.ids}});
}

Status embedding_forward(const EmbeddingForward& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<EmbeddingForward>* row = nullptr;
  if (Status s = select_row<EmbeddingForward>("embedding", kForward, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

std::size_t embedding_backward_workspace(const EmbeddingBackward& p) {
  return static_cast<std::size_t>(numel(p.ids)) * 8;
}

Status embedding_backward(const EmbeddingBackward& p, const char* kernel, Workspace workspace,
                          Stream stream) {
  if (Status s = check(p.dtable, p.ids, p.dy, true); !s) return s;
  if (Status s = check_flag(p.out_of_range); !s) return s;
  if (Status s = check_workspace("embedding", embedding_backward_workspace(p), workspace); !s) {
    return s;
  }
  if (Status s =
          check_memory("embedding", {{"dtable", &p.dtable}, {"out_of_range", p.out_of_range}},
                       {{"dy", &p.dy}, {"ids", &p.ids}}, workspace);
      !s) {
    return s;
  }
  if (numel(p.dtable) == 0) return {};
  const cudaError_t e =
      cudaMemsetAsync(p.dtable.data, 0,
                      static_cast<std::size_t>(numel(p.dtable)) * size_of(p.dtable.dtype), stream);
  if (e != cudaSuccess) return cuda_status("embedding", e, "a cleared gradient");
  if (numel(p.dy) == 0) return {};
  const KernelRow<EmbeddingBackward>* row = nullptr;
  if (Status s = select_row<EmbeddingBackward>("embedding", kBackward, p, kernel, &row); !s)
    return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
