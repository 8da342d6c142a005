// linears and quant_linears by gemv's groups: several weights against a few rows, which may be normalised
// on their way.
#include "_shim/dispatch_shim.hpp"
#include "gemv/api.hpp"
#include "rows/product.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

template <bool kQuantised>
struct LinearsOp {
  using Problem = cuda_ops::GemvGroup;
  static constexpr const char* kOp = kQuantised ? "quant_linears" : "linears";
  // So many rows, in two weights, are more than one turn of a large card's blocks.
  static constexpr rm_edge kEdges[] = {{'N', 0, 1088}, {'K', 0, kQuantised ? 512 : 128}};
  // operands: x, norm, the norm's bias, residual, then w (its integers and scales) and bias each
  static constexpr size_t kFirst = 4, kEach = kQuantised ? 3 : 2, kMost = 3;
  static constexpr int64_t kMostRows = kQuantised ? 1 : 8;
  /// Plans do not use the last: where the others do not serve, single products do better than it, which is
  /// for operands that turn out to lie on odd addresses.
  static auto rows() {
    return cuda_ops::gemv_group_rows().subspan(kQuantised ? 4 : 0, kQuantised ? 1 : 4);
  }

  std::vector<Placed> tensors;
  bool stable = true;
  cuda_ops::GemvGroup given;  // without tensors
  int norm = -1, norm_bias = -1, residual = -1;  // in `tensors`, as the following
  int w[kMost], scales[kMost], bias[kMost], y[kMost];

  explicit LinearsOp(const rm_problem& raw) {
    const Operands p(raw);
    given.turned = p.attr_int("trans_b", 1) == 0;
    given.centred = p.attr_int("centred", 0) != 0;
    given.gated = p.attr_int("gated", 0) != 0;
    given.activation = activation_of(p.attr_string("activation", "none"));
    given.eps = static_cast<float>(p.attr_float("eps", 1e-5));
    given.weight_offset = static_cast<float>(p.attr_float("weight_offset", 0.0));
    add(rows_of(p.input(0), kMostRows), 0, false);
    const int64_t k = tensors[0].tensor.shape[1];
    const int64_t rows = tensors[0].tensor.shape[0];
    given.count = 0;
    for (size_t i = 0; i < kMost; ++i) {
      const size_t at = kFirst + kEach * i;
      w[i] = scales[i] = bias[i] = y[i] = -1;
      if (!p.has_input(at)) break;
      ++given.count;
      if constexpr (kQuantised) {
        w[i] = weight(p, at, [&](Tensor& q) {
          Grouping(p).strip_padding(q, k);
          if (q.shape[1] != q.stride[0]) throw NotForModule("rows of the weight are padded");
        });
        scales[i] = weight(p, at + 1);
      } else {
        w[i] = weight(p, at);
      }
      if (p.has_input(at + kEach - 1)) bias[i] = weight(p, at + kEach - 1);
      if (!given.gated || i == 0) y[i] = add(rows_of(p.output(i), rows), i, true);
    }
    if (p.has_input(1)) norm = weight(p, 1);
    if (p.has_input(2)) norm_bias = weight(p, 2);
    if (p.has_input(3)) residual = add(rows_of(p.input(3), rows), 3, false);
  }

  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0];
    const auto optional = [&](int i) { return i >= 0 ? &t[i] : nullptr; };
    for (int i = 0; i < p.count; ++i) {
      p.w[i] = t[w[i]];
      p.scales[i] = optional(scales[i]), p.bias[i] = optional(bias[i]);
      if (y[i] >= 0) p.y[i] = t[y[i]];
    }
    p.norm = optional(norm), p.norm_bias = optional(norm_bias), p.residual = optional(residual);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv_group(p, kernel, stream);
  }

 private:
  int add(const Tensor& t, size_t index, bool result) {
    tensors.push_back({t, index, result});
    return static_cast<int>(tensors.size()) - 1;
  }
  static Tensor rows_of(Tensor t, int64_t most) {
    if (!cuda_ops::fold_rows(t) || t.shape[0] < 1 || t.shape[0] > most) throw NotForModule("more rows");
    if (t.shape[0] > 1 && t.stride[0] != t.shape[1]) throw NotForModule("rows have gaps");
    t.stride[0] = t.shape[1];
    return t;
  }
  /// change(tensor) makes it what the module has. Copied before every launch it would cost more than
  /// it gives.
  template <class Change>
  int weight(const Operands& p, size_t index, const Change& change) {
    stable = stable && p.is_constant(index);
    Tensor t = p.input(index);
    if (!cuda_ops::is_contiguous(t)) throw NotForModule("a weight has gaps");
    change(t);
    return add(t, index, false);
  }
  int weight(const Operands& p, size_t index) {
    return weight(p, index, [](Tensor&) {});
  }
};

}  // namespace

void add_linears_rows(std::vector<rm_kernel>& out) {
  Row<LinearsOp<false>>::add(out);
  Row<LinearsOp<true>>::add(out);
}

}  // namespace rm::cuda
