// Names the axes of a problem's operands, reduces the sizes, lays the operands out again.
#include "selfcheck/alike.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "ir/type.hpp"
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

/// One axis of the problem; several axes of operands may share it.
struct Axis {
  int64_t size;
  char letter;     // of docs/operators.md, 0: none
  bool inner;      // kernels run along it in vectors
  bool fixed = false;
};

/// The axes of each operand as indices; inputs, then outputs. Empty for an absent one.
struct Axes {
  std::vector<Axis> all;
  std::vector<std::vector<int>> of;

  int add(int64_t size, char letter, bool inner = false, bool fixed = false) {
    all.push_back({size, letter, inner, fixed});
    return static_cast<int>(all.size()) - 1;
  }
};

Layout layout_of(const rm_tensor& t) {
  Layout out;
  ir::from_dlpack(t.dtype, &out.dtype);
  out.dims.assign(t.shape, t.shape + t.ndim);
  out.strides.assign(t.strides, t.strides + t.ndim);
  return out;
}

int64_t int_attr(const Shape& s, const char* name, int64_t otherwise) {
  auto it = s.attrs.find(name);
  const auto* value = it == s.attrs.end() ? nullptr : std::get_if<int64_t>(&it->second);
  return value == nullptr ? otherwise : *value;
}

Ints ints_attr(const Shape& s, const char* name) {
  auto it = s.attrs.find(name);
  const auto* value = it == s.attrs.end() ? nullptr : std::get_if<Ints>(&it->second);
  return value == nullptr ? Ints{} : *value;
}

/// Leading axes of products become rows where every operand allows it: kernels do the same, and
/// tiles lie over the rows of all.
void fold_rows(const std::vector<Operand*>& operands) {
  std::vector<Layout> folded;
  for (const Operand* o : operands) {
    if (!o->present) {
      folded.emplace_back();
      continue;
    }
    const Ints& dims = o->layout.dims;
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < dims.size(); ++i) rows *= dims[i];
    if (o->layout.is_empty()) return;
    auto view = ir::view_reshape(o->layout, {rows, dims.back()});
    if (!view) return;
    folded.push_back(*view);
  }
  for (size_t i = 0; i < operands.size(); ++i) operands[i]->layout = folded[i];
}

bool present(const std::vector<Operand>& list, size_t i) {
  return i < list.size() && list[i].present;
}

/// Every operand's axes from the left are those of the first, however many it has.
Axes by_position(const Shape& s) {
  Axes a;
  const Ints& dims = s.outputs[0].layout.dims.size() >= s.inputs[0].layout.dims.size()
                         ? s.outputs[0].layout.dims
                         : s.inputs[0].layout.dims;
  for (size_t d = 0; d < dims.size(); ++d) a.add(dims[d], 0, d + 1 == dims.size());
  for (const auto* list : {&s.inputs, &s.outputs}) {
    for (const Operand& o : *list) {
      std::vector<int> own;
      for (size_t d = 0; o.present && d < o.layout.dims.size(); ++d) {
        const int64_t size = o.layout.dims[d];
        const bool same = d < dims.size() && size == dims[d];
        own.push_back(same ? static_cast<int>(d) : a.add(size, 0, false, size == 1));
      }
      a.of.push_back(std::move(own));
    }
  }
  return a;
}

Axes gemm_axes(Shape& s) {
  if (s.inputs[1].layout.dims.size() == 2) {
    std::vector<Operand*> rows{&s.inputs[0], &s.outputs[0]};
    if (present(s.inputs, 3)) rows.push_back(&s.inputs[3]);
    fold_rows(rows);
  }
  Axes a;
  const Ints &x = s.inputs[0].layout.dims, &w = s.inputs[1].layout.dims;
  std::vector<int> lead;
  for (size_t i = 0; i + 2 < x.size(); ++i) lead.push_back(a.add(x[i], '*'));
  const int m = a.add(x[x.size() - 2], 'M'), k = a.add(x.back(), 'K', true);
  const int n = a.add(s.outputs[0].layout.dims.back(), 'N', true);
  auto with = [&](bool leads, int first, int second) {
    std::vector<int> out = leads ? lead : std::vector<int>{};
    out.push_back(first);
    out.push_back(second);
    return out;
  };
  const bool rows = int_attr(s, "trans_b", 0) != 0;
  a.of.push_back(with(true, m, k));
  a.of.push_back(with(w.size() > 2, rows ? n : k, rows ? k : n));
  a.of.push_back({n});
  a.of.push_back(with(true, m, n));
  a.of.resize(s.inputs.size());
  a.of.push_back(with(true, m, n));
  return a;
}

Axes quant_linear_axes(Shape& s) {
  std::vector<Operand*> rows{&s.inputs[0], &s.outputs[0]};
  if (present(s.inputs, 5)) rows.push_back(&s.inputs[5]);
  if (s.inputs[0].layout.dims.size() > 1) fold_rows(rows);
  Axes a;
  const Ints& x = s.inputs[0].layout.dims;
  std::vector<int> lead;
  for (size_t i = 0; i + 1 < x.size(); ++i) lead.push_back(a.add(x[i], i + 2 == x.size() ? 'M' : '*'));
  const int k = a.add(x.back(), 'K', true), n = a.add(s.outputs[0].layout.dims.back(), 'N', true);
  const int p = a.add(s.inputs[1].layout.dims[1], 'P', false, true);
  const bool pairs = int_attr(s, "pairs", 0) != 0;
  const int g = a.add(s.inputs[2].layout.dims[pairs ? 0 : 1], 'g', false, true);
  auto with = [&](int last) {
    std::vector<int> out = lead;
    out.push_back(last);
    return out;
  };
  a.of = {with(k), {n, p}, {n, g}, {n, g}, {n}, with(n)};
  if (pairs) std::swap(a.of[2][0], a.of[2][1]);
  a.of.resize(s.inputs.size());
  a.of.push_back(with(n));
  return a;
}

Axes quantize_axes(const Shape& s) {
  Axes a;
  const int n = a.add(s.inputs[0].layout.dims[0], 'N'), k = a.add(s.inputs[0].layout.dims[1], 'K', true);
  const int p = a.add(s.outputs[0].layout.dims[1], 'P', false, true);
  const bool pairs = int_attr(s, "pairs", 0) != 0;
  const int g = a.add(s.outputs[1].layout.dims[pairs ? 0 : 1], 'g', false, true);
  a.of = {{n, k}, {n, p}, {n, g}};
  if (pairs) std::swap(a.of[2][0], a.of[2][1]);
  if (s.outputs.size() > 2) a.of.push_back({n, g});
  return a;
}

Axes sdpa_axes(const Shape& s) {
  Axes a;
  const Ints &q = s.inputs[0].layout.dims, &k = s.inputs[1].layout.dims;
  const int b = a.add(q[0], '*'), h = a.add(q[1], 'H', false, true), g = a.add(k[1], '*');
  const int rows = a.add(q[2], 'S'), t = a.add(k[2], 'T', true), d = a.add(q[3], 'D', true);
  const int e = a.add(s.outputs[0].layout.dims[3], 'E', true);
  a.of = {{b, h, rows, d}, {b, g, t, d}, {b, g, t, e}, {b, h, rows, t}};
  if (s.inputs.size() > 4) a.of.push_back({a.add(1, 0, false, true)});
  a.of.resize(s.inputs.size());
  a.of.push_back({b, h, rows, e});
  return a;
}

Axes append_sdpa_axes(const Shape& s) {
  Axes a;
  const Ints &q = s.inputs[0].layout.dims, &cache = s.outputs[1].layout.dims;
  const int b = a.add(q[0], '*'), h = a.add(q[1], 'H', false, true), g = a.add(cache[1], '*');
  const int one = a.add(1, 0, false, true), t = a.add(cache[2], 'T', true);
  const int d = a.add(q[3], 'D', true, true);
  a.of = {{b, h, one, d}, {b, g, one, d}, {b, g, one, d}, {b, h, one, d}, {b, h, one, d}, {one}, {b, h, one, t}};
  a.of.resize(s.inputs.size());
  a.of.insert(a.of.end(), {{b, h, one, d}, {b, g, t, d}, {b, g, t, d}});
  // Angles may be given for one head.
  for (size_t i : {size_t{3}, size_t{4}}) {
    const Ints& angles = s.inputs[i].layout.dims;
    if (angles[0] != q[0]) a.of[i][0] = one;
    if (angles[1] != q[1]) a.of[i][1] = one;
  }
  if (s.inputs.size() > 6 && s.inputs[6].present) {
    const Ints& mask = s.inputs[6].layout.dims;
    if (mask[0] != q[0]) a.of[6][0] = one;
    if (mask[1] != q[1]) a.of[6][1] = one;
  }
  return a;
}

/// One row of x: an axis of rows for each weight.
Axes linears_axes(Shape& s) {
  std::vector<Operand*> rows{&s.inputs[0], &s.inputs[2]};
  for (Operand& o : s.outputs) rows.push_back(&o);
  fold_rows(rows);
  Axes a;
  const int one = a.add(1, 0, false, true), k = a.add(s.inputs[0].layout.dims.back(), 'K', true);
  a.of = {{one, k}, {k}, {}};
  std::vector<int> n;
  for (size_t i = 3; i < s.inputs.size(); i += 2) {
    const int64_t size = s.inputs[i].layout.dims[0];
    // Gated products have one size.
    const bool again = !n.empty() && s.outputs.size() == 1;
    n.push_back(again ? n.front() : a.add(size, 'N', true));
    a.of.push_back({n.back(), k});
    a.of.push_back({n.back()});
  }
  a.of[2] = {one, n.front()};
  a.of.resize(s.inputs.size());
  for (size_t i = 0; i < s.outputs.size(); ++i) a.of.push_back({one, n[i]});
  return a;
}

Axes embedding_axes(const Shape& s) {
  Axes a;
  const int v = a.add(s.inputs[0].layout.dims[0], 'V');
  const int n = a.add(s.inputs[0].layout.dims[1], 'N', true);
  std::vector<int> ids;
  for (int64_t size : s.inputs[1].layout.dims) ids.push_back(a.add(size, 0));
  a.of = {{v, n}, ids, ids};
  a.of[2].push_back(n);
  return a;
}

/// gather, scatter, index_copy, index: sizes of the index and of what it points into are one axis
/// where they are equal; axes over which the values of an index run are their own.
Axes lookup_axes(const Shape& s) {
  Axes a;
  const bool copies = s.op == "index_copy";
  const Layout& x = copies ? s.outputs[0].layout : s.inputs[0].layout;
  std::vector<int> whole;
  for (size_t d = 0; d < x.dims.size(); ++d) whole.push_back(a.add(x.dims[d], 0, d + 1 == x.dims.size()));
  if (s.op == "index") {
    const Ints axes = ints_attr(s, "axes");
    std::vector<int> shared;
    for (int64_t size : s.inputs[1].layout.dims) shared.push_back(a.add(size, 0));
    a.of.push_back(whole);
    for (size_t i = 1; i < s.inputs.size(); ++i) a.of.push_back(shared);
    std::vector<int> out(whole.begin(), whole.begin() + axes.front());
    out.insert(out.end(), shared.begin(), shared.end());
    out.insert(out.end(), whole.begin() + axes.back() + 1, whole.end());
    a.of.push_back(out);
    return a;
  }
  const auto rank = static_cast<int64_t>(x.dims.size());
  const auto axis = static_cast<size_t>(int_attr(s, "axis", rank - 1));
  const Ints& index = s.inputs[1].layout.dims;  // of index_copy: the source
  std::vector<int> pointed;
  for (size_t d = 0; d < index.size(); ++d) {
    const bool same = d != axis && index[d] == x.dims[d];
    // An index may be shorter than what it points into, and must stay so.
    if (d != axis && !same) a.all[d].fixed = true;
    pointed.push_back(same ? whole[d] : a.add(index[d], 0, d + 1 == index.size(), d != axis));
  }
  if (copies) {
    a.of = {{pointed[axis]}, pointed, whole};
  } else if (s.op == "scatter") {
    a.of = {whole, pointed, pointed, whole};
  } else {
    a.of = {whole, pointed, pointed};
  }
  return a;
}

/// Axes that every operand steps through evenly become one, as kernels have them.
void merge_axes(Shape& s) {
  std::vector<Operand*> all;
  for (auto* list : {&s.inputs, &s.outputs}) {
    for (Operand& o : *list) all.push_back(&o);
  }
  const size_t rank = s.outputs[0].layout.dims.size();
  for (const Operand* o : all) {
    if (!o->present || o->layout.dims != s.outputs[0].layout.dims) return;
  }
  for (size_t d = rank; d-- > 1;) {
    const bool even = std::all_of(all.begin(), all.end(), [&](const Operand* o) {
      const Layout& l = o->layout;
      return l.strides[d - 1] == l.strides[d] * l.dims[d];
    });
    if (!even) continue;
    for (Operand* o : all) {
      Layout& l = o->layout;
      l.dims[d - 1] *= l.dims[d];
      l.strides[d - 1] = l.strides[d];
      l.dims.erase(l.dims.begin() + static_cast<std::ptrdiff_t>(d));
      l.strides.erase(l.strides.begin() + static_cast<std::ptrdiff_t>(d));
    }
  }
}

Axes axes_of(Shape& s) {
  if (s.op == "gemm") return gemm_axes(s);
  if (s.op == "quant_linear") return quant_linear_axes(s);
  if (s.op == "quantize") return quantize_axes(s);
  if (s.op == "sdpa") return sdpa_axes(s);
  if (s.op == "append_sdpa") return append_sdpa_axes(s);
  if (s.op == "linears") return linears_axes(s);
  if (s.op == "embedding") return embedding_axes(s);
  if (s.op == "gather" || s.op == "scatter" || s.op == "index" || s.op == "index_copy") {
    return lookup_axes(s);
  }
  if (s.op == "ewise" || s.op == "copy") merge_axes(s);
  Axes a = by_position(s);
  // The last axis of norms has a letter; the weights lie along it.
  if ((s.op == "layer_norm" || s.op == "rms_norm") && !a.all.empty()) {
    const int n = a.of[0].back();
    a.all[static_cast<size_t>(n)].letter = 'N';
    for (size_t i = 0; i < a.of.size(); ++i) {
      if (a.of[i].size() == 1) a.of[i][0] = n;
    }
  }
  if (s.op == "adam") a.of[4] = {a.add(s.inputs[4].layout.dims[0], 0, false, true)};
  if (s.op == "softmax") a.all[static_cast<size_t>(a.of[0].back())].letter = 'N';
  return a;
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

/// K of quantised weights stays a whole number of groups and a rest.
void add_group(const Shape& s, const Axis& axis, std::vector<int64_t>& edges) {
  if (axis.letter != 'K' || (s.op != "quant_linear" && s.op != "quantize")) return;
  edges.push_back(64);
  edges.push_back(int_attr(s, "group", 32));
}

double products(const Shape& s, const Axes& a, const std::vector<int64_t>& sizes) {
  double out = 1;
  for (size_t i = 0; i < a.all.size(); ++i) {
    if (!a.all[i].fixed || a.all[i].letter == 'H') out *= static_cast<double>(sizes[i]);
  }
  if (s.op == "sdpa") out /= static_cast<double>(std::max<int64_t>(1, sizes[a.of[1][1]]));
  return out;
}

int64_t elements(const Axes& a, const std::vector<int64_t>& sizes, size_t operand) {
  int64_t out = 1;
  for (int axis : a.of[operand]) out *= std::max<int64_t>(1, sizes[static_cast<size_t>(axis)]);
  return out;
}

bool is_product(const Shape& s) {
  return s.op == "gemm" || s.op == "quant_linear" || s.op == "sdpa" || is_fused(s.op);
}

/// Repeated axes to a few, the outermost first, until the check is affordable.
void bound(const Shape& s, const rm_kernel& row, const Axes& a, std::vector<int64_t>& sizes) {
  auto few = [&](size_t i) { sizes[i] = std::min(sizes[i], kFew); };
  for (size_t i = 0; i < a.all.size(); ++i) {
    if (a.all[i].letter == '*') sizes[i] = std::min(sizes[i], s.op == "sdpa" || s.op == "append_sdpa" ? 2 : kFew);
  }
  if (is_product(s)) {
    const bool slow = (row.traits & RM_KERNEL_FALLBACK) != 0;
    const double most = slow ? kFallbackProducts : kMostProducts;
    for (size_t i = 0; i < a.all.size() && products(s, a, sizes) > most; ++i) {
      if (a.all[i].letter == '*') sizes[i] = std::min<int64_t>(sizes[i], 2);
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
  if (s.op == "sdpa" || s.op == "append_sdpa") {
    const auto g = static_cast<size_t>(a.of[1][1]), h = find('H');
    if (a.all[g].size > 0) sizes[h] = sizes[g] * (a.all[h].size / a.all[g].size);
  }
  if (s.op == "index_copy" || s.op == "scatter") {
    // Every source has a place of its own.
    const size_t to = s.op == "scatter" ? 0 : a.of.size() - 1;
    const auto rank = static_cast<int64_t>(a.of[to].size());
    const auto axis = static_cast<size_t>(int_attr(s, "axis", rank - 1));
    int64_t& places = sizes[static_cast<size_t>(a.of[to][axis])];
    places = std::max(places, sizes[static_cast<size_t>(a.of[1][axis])]);
  }
  if (s.op == "sort" && int_attr(s, "k", -1) >= 0) {
    const auto rank = static_cast<int64_t>(a.of[0].size());
    const auto axis = static_cast<size_t>(int_attr(s, "axis", rank - 1));
    int64_t& from = sizes[static_cast<size_t>(a.of[0][axis])];
    const int64_t to = sizes[static_cast<size_t>(a.of[1][axis])];
    from = std::max(from, to);
    s.attrs["k"] = to;
  }
  if (s.op == "quant_linear" || s.op == "quantize") {
    const int64_t k = sizes[find('K')], group = int_attr(s, "group", 32);
    sizes[find('P')] = (k + 63) / 64 * 64 * int_attr(s, "bits", 8) / 8;
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
