// Reduces the sizes of a problem's axes and lays the operands out again.
#include "selfcheck/alike.hpp"

#include <algorithm>
#include <numeric>

#include "ir/type.hpp"
#include "selfcheck/alike_axes.hpp"
#include "selfcheck/fused.hpp"

namespace rm::selfcheck {
namespace {

using ir::Ints;
using ir::Layout;
using select::Operand;

constexpr int64_t kSteps = 2;  // of an edge: one that starts a sum or a stream, one that goes on
// Where a row names no edge of an axis: vectors and their unrolling end at powers of two.
constexpr int64_t kInnerEdge = 64, kOuterEdge = 16, kFallbackEdge = 16;
constexpr int64_t kFew = 3;  // of an axis that only repeats the rest
constexpr double kMostProducts = 48e6;   // multiply-adds: a millisecond of the slowest packed row
constexpr double kFallbackProducts = 1e6;
constexpr int64_t kMostElements = 12 << 10;  // of a result that the reference computes whole

Layout layout_of(const rm_tensor& t) {
  Layout out;
  ir::from_dlpack(t.dtype, &out.dtype);
  out.dims.assign(t.shape, t.shape + t.ndim);
  out.strides.assign(t.strides, t.strides + t.ndim);
  return out;
}

std::vector<int64_t> edges_of(const rm_kernel& row, const Axis& axis) {
  std::vector<int64_t> out;
  const size_t end = row.struct_size >= sizeof(rm_kernel) ? row.num_edges : 0;
  bool letters = false;
  for (size_t i = 0; i < end; ++i) {
    letters = letters || row.edges[i].axis != 0;
    const bool meant = row.edges[i].axis == 0 ? axis.inner
                                              : row.edges[i].axis == static_cast<uint32_t>(axis.letter);
    if (meant && row.edges[i].size > 1) out.push_back(row.edges[i].size);
  }
  if (!out.empty()) return out;
  if ((row.traits & RM_KERNEL_FALLBACK) != 0 && axis.letter != 0) return {kFallbackEdge};
  return {axis.inner ? kInnerEdge : kOuterEdge};
}

bool has_groups(const Shape& s) {
  return s.op == "quant_linear" || s.op == "quant_linears" || s.op == "quantize";
}

/// K of quantised weights stays a whole number of groups and a rest.
void add_group(const Shape& s, const Axis& axis, std::vector<int64_t>& edges) {
  if (axis.letter != 'K' || !has_groups(s)) return;
  edges.push_back(64);
  edges.push_back(attr_or<int64_t>(s, "group", 32));
}

bool attends(const Shape& s) { return s.op == "sdpa" || s.op == "sdpa_backward"; }

double products(const Shape& s, const Axes& a, const std::vector<int64_t>& sizes) {
  double out = 1;
  for (size_t i = 0; i < a.all.size(); ++i) {
    if (!a.all[i].fixed || a.all[i].letter == 'H') out *= static_cast<double>(sizes[i]);
  }
  if (attends(s)) out /= static_cast<double>(std::max<int64_t>(1, sizes[a.of[1][1]]));
  return out;
}

int64_t elements(const Axes& a, const std::vector<int64_t>& sizes, size_t operand) {
  int64_t out = 1;
  for (int axis : a.of[operand]) out *= std::max<int64_t>(1, sizes[static_cast<size_t>(axis)]);
  return out;
}

bool is_product(const Shape& s) {
  return s.op == "gemm" || s.op == "grouped_gemm" || s.op == "quant_linear" || attends(s) || (is_fused(s.op) && s.op != "adams" && s.op != "slopes");
}

/// Repeated axes to a few, the outermost first, until the check is affordable.
void bound(const Shape& s, const rm_kernel& row, const Axes& a, std::vector<int64_t>& sizes) {
  auto few = [&](size_t i) { sizes[i] = std::min(sizes[i], kFew); };
  for (size_t i = 0; i < a.all.size(); ++i) {
    if (a.all[i].letter == '*') sizes[i] = std::min(sizes[i], attends(s) || s.op == "append_sdpa" ? 2 : kFew);
  }
  if (is_product(s)) {
    const bool slow = (row.traits & RM_KERNEL_FALLBACK) != 0;
    const double most = slow ? kFallbackProducts : kMostProducts;
    for (size_t i = 0; i < a.all.size() && products(s, a, sizes) > most; ++i) {
      if (a.all[i].letter == '*') sizes[i] = std::min<int64_t>(sizes[i], 2);
    }
    return;
  }
  if (s.op == "adams" || s.op == "slopes") {  // of all parameters
    for (size_t i = 0; i < a.all.size(); ++i) {
      if (!a.all[i].inner && !a.all[i].fixed) few(i);
    }
    return;
  }
  const size_t largest = elements(a, sizes, 0) > elements(a, sizes, a.of.size() - 1)
                             ? 0
                             : a.of.size() - 1;
  for (size_t i = 0; i < a.all.size() && elements(a, sizes, largest) > kMostElements; ++i) {
    if (!a.all[i].inner && !a.all[i].fixed) few(i);
  }
}

/// Sizes that follow from others.
void derive(Shape& s, const Axes& a, std::vector<int64_t>& sizes) {
  auto find = [&](char letter) {
    for (size_t i = 0; i < a.all.size(); ++i) {
      if (a.all[i].letter == letter) return i;
    }
    return a.all.size();
  };
  if (attends(s) || s.op == "append_sdpa") {
    const auto g = static_cast<size_t>(a.of[1][1]), h = find('H');
    if (a.all[g].size > 0) sizes[h] = sizes[g] * (a.all[h].size / a.all[g].size);
  }
  if (s.op == "index_copy" || s.op == "scatter") {
    // Every source has a place of its own.
    const size_t to = s.op == "scatter" ? 0 : a.of.size() - 1;
    const auto rank = static_cast<int64_t>(a.of[to].size());
    const auto axis = static_cast<size_t>(attr_or<int64_t>(s, "axis", rank - 1));
    int64_t& places = sizes[static_cast<size_t>(a.of[to][axis])];
    places = std::max(places, sizes[static_cast<size_t>(a.of[1][axis])]);
  }
  if (s.op == "sort" && attr_or<int64_t>(s, "k", -1) >= 0) {
    const auto rank = static_cast<int64_t>(a.of[0].size());
    const auto axis = static_cast<size_t>(attr_or<int64_t>(s, "axis", rank - 1));
    int64_t& from = sizes[static_cast<size_t>(a.of[0][axis])];
    const int64_t to = sizes[static_cast<size_t>(a.of[1][axis])];
    from = std::max(from, to);
    s.attrs["k"] = to;
  }
  if (has_groups(s)) {
    const int64_t k = sizes[find('K')], group = attr_or<int64_t>(s, "group", 32);
    sizes[find('P')] = (k + 63) / 64 * 64 * attr_or<int64_t>(s, "bits", 8) / 8;
    sizes[find('g')] = (k + group - 1) / group;
  }
}

}  // namespace

Layout laid_out(const Layout& from, const Ints& dims) {
  Layout out = from;
  out.offset = 0;
  out.dims = dims;
  std::vector<size_t> order(dims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (from.strides[a] != from.strides[b]) return from.strides[a] < from.strides[b];
    return a > b;
  });
  int64_t dense_before = 1, dense = 1;
  for (size_t d : order) {
    const int64_t stride = from.strides[d];
    if (stride == 0) continue;
    if (from.dims[d] == 1) {
      out.strides[d] = dense;
      continue;
    }
    // Windows overlap: only their strides say how.
    const int64_t gap = stride - dense_before;
    out.strides[d] = gap < 0 ? std::min(stride, dense) : dense + (gap <= 256 ? gap : 256 + gap % 64);
    dense_before = stride * from.dims[d];
    dense = out.strides[d] * dims[d];
  }
  return out;
}

Shape shape_of(const select::Problem& problem) {
  const rm_problem& p = problem.c();
  Shape out{{p.op.data, p.op.size}, {}, {}, problem.attrs()};
  auto operand = [](const rm_tensor* t, bool constant) {
    return t == nullptr ? Operand{false, {}, false} : Operand{true, layout_of(*t), constant};
  };
  for (size_t i = 0; i < p.num_inputs; ++i) {
    out.inputs.push_back(operand(p.inputs[i], i < 64 && (p.constant_inputs >> i & 1) != 0));
  }
  for (size_t i = 0; i < p.num_outputs; ++i) out.outputs.push_back(operand(p.outputs[i], false));
  return out;
}

int64_t alike_size(int64_t size, std::vector<int64_t> edges) {
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  // Each step a multiple of the smaller ones where that is not far off: then the rest behind the
  // large steps lies between the small ones as it did.
  int64_t together = 1;
  for (int64_t& edge : edges) {
    const int64_t multiple = std::lcm(edge, together);
    if (multiple <= 4 * edge) together = edge = multiple;
  }
  std::sort(edges.begin(), edges.end());
  int64_t out = 0;
  for (size_t i = edges.size(); i-- > 0; size %= edges[i]) {
    out += std::min(size / edges[i], kSteps) * edges[i];
  }
  return out + size;
}

Shape alike(const select::Problem& problem, const rm_kernel& row) {
  Shape s = shape_of(problem);
  if (s.outputs.empty() || !s.outputs[0].present) return s;
  for (const Operand& o : s.inputs) {
    if (o.present && o.layout.is_empty()) return s;  // nothing is read: small as it is
  }
  if (s.op == "small_steps") return s;  // its program has sizes of its own, all of them small
  if (reduce_images(s, row) || reduce_recurrent(s)) return s;
  if (s.inputs.empty()) s.inputs.push_back({false, {}, false});
  const bool none = !s.inputs[0].present;
  if (none) s.inputs[0] = s.outputs[0];
  const Axes axes = axes_of(s);
  std::vector<int64_t> sizes;
  for (const Axis& axis : axes.all) {
    std::vector<int64_t> edges = edges_of(row, axis);
    add_group(s, axis, edges);
    sizes.push_back(axis.fixed ? axis.size : alike_size(axis.size, edges));
  }
  bound(s, row, axes, sizes);
  derive(s, axes, sizes);
  size_t at = 0;
  for (auto* list : {&s.inputs, &s.outputs}) {
    for (Operand& o : *list) {
      const std::vector<int>& own = axes.of[at++];
      if (!o.present) continue;
      Ints dims;
      for (int axis : own) dims.push_back(sizes[static_cast<size_t>(axis)]);
      o.layout = laid_out(o.layout, dims);
    }
  }
  if (none) s.inputs.erase(s.inputs.begin());
  return s;
}

}  // namespace rm::selfcheck
