// Operators that lay elements out anew: padding, repetition, blocks, triangles.
#include <algorithm>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

int64_t fixed(const Importer& m, const Dim& d) {
  if (!d.is_static()) m.refuse("sizes that are numbers", d.str());
  return d.value();
}

ValueId block(Importer& m, ValueId value, const Dims& shape) {
  return m.op("expand", {m.reshape(value, {})}, {{"shape", shape}});
}

// The elements that lie around an axis of n, `before` in front and `after` behind.
Ints around(const Importer& m, const std::string& mode, int64_t n, int64_t before, int64_t after) {
  const int64_t limit = int64_t{1} << 20;
  if (n < 1 || n > limit || before > limit || after > limit)
    m.refuse("an axis to repeat", std::to_string(n));
  Ints out;
  for (int64_t k = -before; k < n + after; ++k) {
    int64_t at = std::clamp<int64_t>(k, 0, n - 1);  // edge
    if (mode == "wrap") at = (k % n + n) % n;
    if (mode == "reflect" && n > 1) {
      const int64_t turn = 2 * (n - 1), off = (k % turn + turn) % turn;
      at = std::min(off, turn - off);
    }
    out.push_back(at);
  }
  return out;
}

// Elements are dropped first where a pad is below zero.
ValueId padded(Importer& m, ValueId y, int64_t axis, int64_t before, int64_t after,
               const std::string& mode, ValueId value) {
  const auto a = static_cast<size_t>(axis);
  if (before < 0 || after < 0) {
    const int64_t n = m.fixed(m.dims(y)[a]);
    const int64_t start = std::clamp<int64_t>(-before, 0, n),
                  stop = std::clamp<int64_t>(n + std::min<int64_t>(after, 0), start, n);
    y = m.slice(y, axis, Dim(start), Dim(stop), 1);
    before = std::max<int64_t>(before, 0);
    after = std::max<int64_t>(after, 0);
  }
  if (before == 0 && after == 0) return y;
  if (mode != "constant") {
    return m.take(y, axis, m.integers(around(m, mode, m.fixed(m.dims(y)[a]), before, after)));
  }
  const int64_t limit = int64_t{1} << 30;
  if (before > limit || after > limit)
    m.refuse("pads that memory can hold", std::to_string(std::max(before, after)));
  std::vector<ValueId> parts{y};
  Dims shape = m.dims(y);
  auto add = [&](int64_t size, bool in_front) {
    if (size == 0) return;
    shape[a] = Dim(size);
    parts.insert(in_front ? parts.begin() : parts.end(), block(m, value, shape));
  };
  add(before, true);
  add(after, false);
  return m.concat(parts, axis);
}

void convert_pad(Importer& m) {
  ValueId y = m.in(0);
  const std::string mode = m.s("mode", "constant");
  if (mode != "constant" && mode != "edge" && mode != "reflect" && mode != "wrap")
    m.refuse("constant, edge, reflect or wrap", mode);
  const size_t n = m.rank(y);
  Ints pads = m.opset() < 11 ? m.ints("pads").value_or(Ints{}) : m.integers(1, "pads"), axes;
  if (m.has(3)) axes = m.integers(3, "axes");
  if (!m.has(3)) {
    for (size_t k = 0; k < n; ++k) axes.push_back(static_cast<int64_t>(k));
  }
  if (pads.size() != 2 * axes.size()) m.refuse("two pads an axis", std::to_string(pads.size()));
  ValueId value = m.opset() >= 11 && m.has(2) ? m.in(2) : m.number(y, m.f("value", 0));
  if (m.type(value).dtype != m.type(y).dtype) m.refuse("a value of the operand's type", "another");
  for (size_t k = 0; k < axes.size(); ++k) {
    y = padded(m, y, m.axis(axes[k], n), pads[k], pads[k + axes.size()], mode, value);
  }
  m.out(y);
}

// Around the middle; of an odd number the smaller half goes in front.
void convert_center(Importer& m) {
  ValueId y = m.in(0), zero = m.number(y, 0);
  const Ints wanted = m.integers(1, "a shape");
  Ints axes = m.ints("axes").value_or(Ints{});
  if (axes.empty()) {
    for (size_t k = 0; k < m.rank(y); ++k) axes.push_back(static_cast<int64_t>(k));
  }
  if (wanted.size() != axes.size()) m.refuse("a size for each axis", std::to_string(wanted.size()));
  for (size_t k = 0; k < axes.size(); ++k) {
    const int64_t axis = m.axis(axes[k], m.rank(y)),
                  size = m.fixed(m.dims(y)[static_cast<size_t>(axis)]);
    if (wanted[k] < 0) m.refuse("sizes of at least 0", std::to_string(wanted[k]));
    const int64_t gap = wanted[k] - size, before = gap >= 0 ? gap / 2 : -(-gap / 2);
    y = padded(m, y, axis, before, gap - before, "constant", zero);
  }
  m.out(y);
}

void convert_tile(Importer& m) {
  ValueId x = m.in(0);
  const Dims repeats = m.known(1, "repeats"), from = m.dims(x);
  if (repeats.size() != from.size()) m.refuse("a number of times an axis", "others");
  Dims split, wide, joined;  // [d] -> [1, d] -> [r, d] -> [r d]
  for (size_t k = 0; k < from.size(); ++k) {
    if (repeats[k].value_or(0) < 0) m.refuse("repeats of at least 0", repeats[k].str());
    split.insert(split.end(), {Dim(1), from[k]});
    wide.insert(wide.end(), {repeats[k], from[k]});
    joined.push_back(repeats[k] * from[k]);
  }
  m.out(m.reshape(m.op("expand", {m.reshape(x, split)}, {{"shape", wide}}), joined));
}

void convert_blocks(Importer& m) {
  const bool to_space = m.node().op == "DepthToSpace";
  ValueId x = m.in(0);
  const Dims d = m.dims(x);
  const int64_t b = m.i("blocksize", 1);
  if (d.size() != 4 || b < 1 || b > 4096) m.refuse("images and a block", m.type(x).str());
  if (to_space) {
    const int64_t c = fixed(m, d[1]);
    if (c % (b * b) != 0) m.refuse("whole blocks of channels", std::to_string(c));
    const bool crd = m.s("mode", "DCR") == "CRD";
    const Dims split = crd ? Dims{d[0], Dim(c / b / b), Dim(b), Dim(b), d[2], d[3]}
                           : Dims{d[0], Dim(b), Dim(b), Dim(c / b / b), d[2], d[3]};
    ValueId y =
        m.permute(m.reshape(x, split), crd ? Ints{0, 1, 4, 2, 5, 3} : Ints{0, 3, 4, 1, 5, 2});
    return m.out(m.reshape(y, {d[0], Dim(c / b / b), d[2] * Dim(b), d[3] * Dim(b)}));
  }
  const int64_t h = fixed(m, d[2]), w = fixed(m, d[3]);
  if (h % b != 0 || w % b != 0) m.refuse("whole blocks", m.type(x).str());
  ValueId y = m.reshape(x, {d[0], d[1], Dim(h / b), Dim(b), Dim(w / b), Dim(b)});
  y = m.permute(y, m.s("mode", "DCR") == "CRD" ? Ints{0, 1, 3, 5, 2, 4} : Ints{0, 3, 5, 1, 2, 4});
  m.out(m.reshape(y, {d[0], d[1] * Dim(b * b), Dim(h / b), Dim(w / b)}));
}

void convert_trilu(Importer& m) {
  ValueId x = m.in(0);
  const Dims d = m.dims(x);
  if (d.size() < 2) m.refuse("matrices", m.type(x).str());
  const Ints k = m.has(1) ? m.integers(1, "a diagonal") : Ints{0};
  if (k.size() != 1) m.refuse("one diagonal", "several");
  auto count = [&](const Dim& n) {
    return m.typed("iota", {}, {{"start", Dims{Dim(0)}}, {"step", int64_t{1}}},
                   {ir::DType::kI64, {n}});
  };
  ValueId rows = m.reshape(count(d[d.size() - 2]), {d[d.size() - 2], Dim(1)});
  ValueId off = m.op("sub", {count(d.back()), rows});
  ValueId diagonal = ir::add_scalar(m.graph(), ir::DType::kI64, static_cast<double>(k[0]));
  ValueId kept = m.op(m.i("upper", 1) != 0 ? "ge" : "le", {off, diagonal});
  m.out(m.op("where", {kept, x, m.number(x, 0)}));
}

}  // namespace

void add_layouts(Table* table) {
  Table& t = *table;
  t["Pad"] = convert_pad;
  t["CenterCropPad"] = convert_center;
  t["Tile"] = convert_tile;
  t["DepthToSpace"] = t["SpaceToDepth"] = convert_blocks;
  t["Trilu"] = convert_trilu;
}

}  // namespace rm::onnx
