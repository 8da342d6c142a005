// Operators that move data: copy, embedding, gather, index, index_copy, scatter.
#include "copy/api.hpp"
#include "embedding/api.hpp"
#include "indexing/api.hpp"
#include "rows/row.hpp"
#include "scatter/api.hpp"
#include "uniform/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

struct CopyOp {
  using Problem = cuda_ops::Copy;
  static constexpr const char* kOp = "copy";
  static auto rows() { return cuda_ops::copy_rows(); }

  std::vector<Placed> tensors;

  explicit CopyOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1]}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::copy(p, kernel, stream);
  }
};

struct EmbeddingOp {
  using Problem = cuda_ops::EmbeddingForward;
  static constexpr const char* kOp = "embedding";
  static auto rows() { return cuda_ops::embedding_forward_rows(); }

  std::vector<Placed> tensors;

  explicit EmbeddingOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.output(0), 0, true}};
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.table = t[0], p.ids = t[1], p.y = t[2];
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::embedding_forward(p, kernel, stream);
  }
};

/// The operator's axis or axes; index_copy's operands are the index and the source.
template <cuda_ops::IndexKind kKind>
struct IndexedOp {
  using Problem = cuda_ops::Indexed;
  static constexpr bool kCopy = kKind == cuda_ops::IndexKind::copy;
  static constexpr bool kUpdates = kCopy;
  static constexpr const char* kOp = kCopy ? "index_copy"
                                     : kKind == cuda_ops::IndexKind::gather ? "gather"
                                                                            : "index";
  static auto rows() { return cuda_ops::indexed_rows(); }

  std::vector<Placed> tensors;  // x, y, indices
  int axis;

  explicit IndexedOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(kCopy ? 1 : 0), kCopy ? size_t{1} : size_t{0}, false},
               {p.output(0), 0, true}};
    const size_t first = kCopy ? 0 : 1, end = kCopy ? 1 : p.num_inputs();
    if (end - first > static_cast<size_t>(cuda_ops::kMostIndices)) {
      throw NotForModule("more than 4 indices");
    }
    for (size_t i = first; i < end; ++i) tensors.push_back({p.input(i), i, false});
    axis = static_cast<int>(p.attr_int("axis", 0));
    if (kKind == cuda_ops::IndexKind::select) {
      const std::vector<int64_t> axes = p.attr_ints("axes");
      if (axes.empty()) throw NotForModule("no axes");
      axis = static_cast<int>(axes[0]);
    }
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.kind = kKind;
    p.x = t[0], p.y = t[1];
    p.indices = static_cast<int>(tensors.size()) - 2;
    for (int k = 0; k < p.indices; ++k) p.index[k] = t[2 + k];
    p.axis = axis;
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::indexed(p, kernel, stream);
  }
};

struct ScatterOp {
  using Problem = cuda_ops::Scatter;
  static constexpr const char* kOp = "scatter";
  static auto rows() { return cuda_ops::scatter_rows(); }

  std::vector<Placed> tensors;  // x, index, src, y
  Problem given;                // without tensors

  explicit ScatterOp(const rm_problem& raw) {
    const Operands p(raw);
    for (size_t i = 0; i < 3; ++i) tensors.push_back({p.input(i), i, false});
    tensors.push_back({p.output(0), 0, true});
    given.axis = static_cast<int>(p.attr_int("axis", 0));
    const std::string_view kind = p.attr_string("kind", "set");
    constexpr std::string_view kNames[] = {"set", "add", "mul", "max", "min"};
    for (int i = 0; i < 5; ++i) {
      if (kind == kNames[i]) given.kind = static_cast<cuda_ops::ScatterKind>(i);
    }
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0], p.index = t[1], p.src = t[2], p.y = t[3];
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::scatter_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::scatter(p, kernel, space, stream);
  }
};

/// Random numbers, a function of a state on the device.
struct UniformOp {
  using Problem = cuda_ops::Uniform;
  static constexpr const char* kOp = "uniform";
  static auto rows() { return cuda_ops::uniform_rows(); }

  std::vector<Placed> tensors;

  explicit UniformOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1]}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::uniform(p, kernel, stream);
  }
};

}  // namespace

void add_move_rows(std::vector<rm_kernel>& out) {
  Row<CopyOp>::add(out);
  Row<EmbeddingOp>::add(out);
  Row<IndexedOp<cuda_ops::IndexKind::gather>>::add(out);
  Row<IndexedOp<cuda_ops::IndexKind::select>>::add(out);
  Row<IndexedOp<cuda_ops::IndexKind::copy>>::add(out);
  Row<ScatterOp>::add(out);
  Row<UniformOp>::add(out);
}

}  // namespace rm::cuda
