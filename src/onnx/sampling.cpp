// Operators that read images at other places: resizing, grids, and what surrounds an image.
#include <algorithm>
#include <cmath>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 22;

// ---- Resize
// -------------------------------------------------------------------------------------------

struct Axis {
  int64_t axis, from, to;
  double scale;               // as given, or sizes divided
  double start = 0, end = 1;  // of the region
};

struct Way {
  std::string mode, places, rounding;
  double cubic_a, outside;
  bool antialias, exclude_outside;
};

// Where element i of the result lies in the operand.
double place(const Way& way, const Axis& a, int64_t i) {
  const auto x = static_cast<double>(i), size = static_cast<double>(a.from),
             length = a.scale * size;
  if (way.places == "align_corners") return length == 1 ? 0 : x * (size - 1) / (length - 1);
  if (way.places == "asymmetric") return x / a.scale;
  if (way.places == "tf_crop_and_resize") {
    const double reach = (a.end - a.start) * (size - 1);
    return a.start * (size - 1) + (length == 1 ? reach / 2 : x * reach / (length - 1));
  }
  if (way.places == "pytorch_half_pixel" && length == 1) return -0.5;
  double offset = 0;
  if (way.places == "half_pixel_symmetric") {
    offset = size / 2 * (1 - static_cast<double>(a.to) / length);
  }
  return offset + (x + 0.5) / a.scale - 0.5;
}

bool is_outside(const Way& way, const Axis& a, double x) {
  return way.places == "tf_crop_and_resize" && (x < 0 || x > static_cast<double>(a.from - 1));
}

int64_t nearest(const Way& way, double x, int64_t size) {
  double at = std::ceil(x - 0.5);  // round_prefer_floor
  if (way.rounding == "round_prefer_ceil") at = std::floor(x + 0.5);
  if (way.rounding == "floor") at = std::floor(x);
  if (way.rounding == "ceil") at = std::ceil(x);
  return std::clamp<int64_t>(static_cast<int64_t>(at), 0, size - 1);
}

double kernel(const Way& way, double x) {
  x = std::fabs(x);
  if (way.mode == "linear") return std::max(1 - x, 0.0);
  const double a = way.cubic_a;
  if (x <= 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
}

// Row i of the matrix that makes the axis anew.
void add_weights(const Way& way, const Axis& a, double x, double* row) {
  const double scale = way.antialias ? std::min(a.scale, 1.0) : 1;
  const double reach = way.mode == "linear" ? 1 : 2, base = std::floor(x);
  const auto first = static_cast<int64_t>(std::floor(-reach / scale) + 1);
  double sum = 0;
  std::vector<std::pair<int64_t, double>> taps;
  for (int64_t k = first; k <= 1 - first; ++k) {
    const auto at = static_cast<int64_t>(base) + k;
    double w = kernel(way, scale * (static_cast<double>(k) - (x - base)));
    if (way.exclude_outside && (at < 0 || at >= a.from)) w = 0;
    sum += w;
    taps.emplace_back(std::clamp<int64_t>(at, 0, a.from - 1), w);
  }
  if (!way.antialias && !way.exclude_outside) sum = 1;
  for (const auto& [at, w] : taps) row[at] += sum == 0 ? 0 : w / sum;
}

// One axis, by numbers of elements (nearest) or a product with a matrix of weights.
ValueId resized(Importer& m, ValueId x, const Way& way, const Axis& a) {
  std::string outside;
  Ints numbers;
  for (int64_t i = 0; i < a.to; ++i) {
    const double at = place(way, a, i);
    outside.push_back(is_outside(way, a, at) ? 1 : 0);
    numbers.push_back(nearest(way, at, a.from));
  }
  ValueId y;
  if (way.mode == "nearest") {
    y = m.take(x, a.axis, m.integers(numbers));
  } else {
    if (a.to * a.from > kMaxSize)
      m.refuse("axes of at most 4096", std::to_string(std::max(a.to, a.from)));
    std::vector<double> weights(static_cast<size_t>(a.to * a.from), 0);
    for (int64_t i = 0; i < a.to; ++i)
      add_weights(way, a, place(way, a, i), weights.data() + i * a.from);
    Ints last, back;  // the axis goes last and comes back
    const auto n = static_cast<int64_t>(m.rank(x));
    for (int64_t k = 0; k < n; ++k) {
      if (k != a.axis) last.push_back(k);
      back.push_back(k < a.axis ? k : k == a.axis ? n - 1 : k - 1);
    }
    last.push_back(a.axis);
    ValueId w = m.floats(weights, {Dim(a.to), Dim(a.from)}, m.dtype(x));
    y = m.permute(m.op("linear", {m.permute(x, last), w}), back);
  }
  if (outside.find('\1') == std::string::npos) return y;
  Dims along(m.rank(y), Dim(1));
  along[static_cast<size_t>(a.axis)] = Dim(a.to);
  ValueId is_out = m.graph().add_literal({ir::DType::kBool, along}, outside);
  return m.op("where", {is_out, m.number(y, way.outside), y});
}

// The operator of the IR serves the usual cases, all spatial axes in one step.
bool plain_resize(Importer& m, ValueId x, const Way& way, const std::vector<Axis>& axes) {
  const size_t n = m.rank(x) - std::min<size_t>(m.rank(x), 2);
  if (n < 1 || n > 3 || !ir::is_floating(m.dtype(x)) || way.mode != "linear" || way.antialias ||
      way.exclude_outside) {
    return false;
  }
  const bool corners = way.places == "align_corners";
  if (!corners && way.places != "half_pixel" && way.places != "pytorch_half_pixel") return false;
  Dims size(m.dims(x));
  size.erase(size.begin(), size.begin() + 2);
  std::vector<double> ratio(n, 1);
  for (const Axis& a : axes) {
    if (a.axis < 2 || (way.places == "pytorch_half_pixel" && a.to == 1)) return false;
    const auto k = static_cast<size_t>(a.axis - 2);
    const double length = a.scale * static_cast<double>(a.from);
    size[k] = Dim(a.to);
    ratio[k] = !corners      ? 1 / a.scale
               : length == 1 ? 0
                             : static_cast<double>(a.from - 1) / (length - 1);
  }
  m.out(m.op("resize", {x},
             {{"mode", way.mode},
              {"size", size},
              {"ratio", ratio},
              {"align_corners", static_cast<int64_t>(corners)}}));
  return true;
}

void convert_resize(Importer& m) {
  ValueId x = m.in(0);
  const Dims d = m.dims(x);
  const bool is_upsample = m.node().op == "Upsample";
  const bool is_old = is_upsample || m.opset() < 11;
  Way way{m.s("mode", "nearest"),
          m.s("coordinate_transformation_mode", is_old ? "asymmetric" : "half_pixel"),
          m.s("nearest_mode", is_old ? "floor" : "round_prefer_floor"),
          m.f("cubic_coeff_a", -0.75),
          m.f("extrapolation_value", 0),
          m.i("antialias", 0) != 0,
          m.i("exclude_outside", 0) != 0};
  if (way.mode == "bilinear" || way.mode == "trilinear") way.mode = "linear";
  if (way.mode != "nearest" && way.mode != "linear" && way.mode != "cubic")
    m.refuse("nearest, linear or cubic", way.mode);
  if (way.mode != "nearest" && !ir::is_floating(m.dtype(x))) m.refuse("floats", m.type(x).str());
  Ints named = m.ints("axes").value_or(Ints{});
  if (named.empty()) {
    for (size_t k = 0; k < d.size(); ++k) named.push_back(static_cast<int64_t>(k));
  }
  std::vector<double> scales, region;
  Ints sizes;
  const size_t at = is_old ? 1 : 2;
  if (is_upsample && m.attribute("scales"))
    scales = m.attribute("scales")->reals;
  else if (m.has(at))
    scales = m.reals(at, "scales");
  if (scales.empty() && m.has(3)) sizes = m.integers(3, "sizes");
  if (way.places == "tf_crop_and_resize") region = m.reals(1, "a region");
  const size_t n = named.size();
  if ((scales.size() != n && sizes.size() != n) || (!region.empty() && region.size() != 2 * n)) {
    m.refuse("a scale or a size for each axis", "others");
  }
  const std::string policy = m.s("keep_aspect_ratio_policy", "stretch");
  double shared = 0;
  for (size_t k = 0; k < sizes.size(); ++k) {
    const double scale =
        static_cast<double>(sizes[k]) /
        static_cast<double>(m.fixed(d[static_cast<size_t>(m.axis(named[k], d.size()))]));
    shared = k == 0                   ? scale
             : policy == "not_larger" ? std::min(shared, scale)
                                      : std::max(shared, scale);
  }
  std::vector<Axis> axes;
  for (size_t k = 0; k < n; ++k) {
    Axis a{m.axis(named[k], d.size()), 0, 0, 1};
    const Dim size = d[static_cast<size_t>(a.axis)];
    if (!region.empty()) a.start = region[k], a.end = region[n + k];
    if (!sizes.empty()) {
      a.from = m.fixed(size);
      a.to = policy == "stretch" ? sizes[k]
                                 : static_cast<int64_t>(shared * static_cast<double>(a.from) + 0.5);
      a.scale =
          policy == "stretch" ? static_cast<double>(a.to) / static_cast<double>(a.from) : shared;
    } else {
      if (scales[k] == 1 && region.empty()) continue;
      a.from = m.fixed(size);
      a.scale = scales[k];
      a.to = static_cast<int64_t>(std::floor(a.scale * static_cast<double>(a.from)));
    }
    if (a.from < 1 || a.to < 1 || a.to > kMaxSize || !(a.scale > 0))
      m.refuse("sizes of at least 1", std::to_string(a.to));
    if (a.to == a.from && a.scale == 1 && a.start == 0 && a.end == 1) continue;
    axes.push_back(a);
  }
  if (plain_resize(m, x, way, axes)) return;
  for (const Axis& a : axes) x = resized(m, x, way, a);
  m.out(x);
}

// ---- grids
// --------------------------------------------------------------------------------------------

// Back and forth between low and high.
ValueId reflected(Importer& m, ValueId c, double low, double high) {
  const double span = high - low;
  if (span <= 0) return m.number(c, 0);
  ValueId off = m.op("abs", {m.op("sub", {c, m.number(c, low)})});
  ValueId rest = m.op("remainder", {off, m.number(c, 2 * span)});
  ValueId back = m.op("sub", {m.number(c, 2 * span), rest});
  return m.op("add", {m.op("minimum", {rest, back}), m.number(c, low)});
}

struct Tap {
  ValueId index, weight, inside;
};

class Sampler {
 public:
  Sampler(Importer& m, ValueId x, std::string mode, std::string border, bool corners)
      : m_(m), mode_(std::move(mode)), border_(std::move(border)), corners_(corners) {
    const Dims d = m.dims(x);
    Ints last{0};
    for (size_t k = 2; k < d.size(); ++k) last.push_back(static_cast<int64_t>(k));
    last.push_back(1);
    x_ = m.permute(x, last);
    sizes_ = d;
  }

  // What lies on axis `a` (0: the first spatial one) at coordinates of -1 to 1.
  std::vector<Tap> taps(ValueId c, size_t a) {
    const int64_t n = m_.fixed(sizes_[a + 2]);
    const auto size = static_cast<double>(n);
    ValueId at = m_.op("add", {c, number(c, 1)});
    if (corners_)
      at = m_.op("mul", {at, number(c, (size - 1) / 2)});
    else
      at = m_.op("sub", {m_.op("mul", {at, number(c, size / 2)}), number(c, 0.5)});
    const double low = corners_ ? 0 : -0.5, high = corners_ ? size - 1 : size - 0.5;
    if (border_ == "reflection" && mode_ != "cubic") at = reflected(m_, at, low, high);
    if (mode_ == "nearest") return {tap(m_.op("round", {at}), ir::kNoValue, n, low, high)};
    ValueId base = m_.op("floor", {at}), part = m_.op("sub", {at, base});
    std::vector<Tap> out;
    if (mode_ == "linear") {
      out.push_back(tap(base, m_.op("sub", {number(c, 1), part}), n, low, high));
      out.push_back(tap(m_.op("add", {base, number(c, 1)}), part, n, low, high));
      return out;
    }
    for (int64_t k = -1; k <= 2; ++k) {
      ValueId off = m_.op("abs", {m_.op("sub", {part, number(c, static_cast<double>(k))})});
      out.push_back(tap(m_.op("add", {base, number(c, static_cast<double>(k))}),
                        cubic(off, k == 0 || k == 1), n, low, high));
    }
    return out;
  }

  // x at one tap of each axis, [N,*,C], times their weights.
  ValueId read(ValueId batch, const std::vector<Tap>& chosen) {
    std::vector<ValueId> operands{x_, batch};
    Ints axes{0};
    ValueId weight = ir::kNoValue, inside = ir::kNoValue;
    for (const Tap& t : chosen) {
      operands.push_back(t.index);
      axes.push_back(static_cast<int64_t>(axes.size()));
      if (t.weight != ir::kNoValue)
        weight = weight == ir::kNoValue ? t.weight : m_.op("mul", {weight, t.weight});
      if (t.inside != ir::kNoValue)
        inside = inside == ir::kNoValue ? t.inside : m_.op("and", {inside, t.inside});
    }
    ValueId v = m_.op("index", operands, {{"axes", axes}});
    auto by_place = [&](ValueId w) {
      Dims d = m_.dims(w);
      d.emplace_back(1);
      return m_.reshape(w, d);
    };
    if (inside != ir::kNoValue) v = m_.op("where", {by_place(inside), v, number(v, 0)});
    return weight == ir::kNoValue ? v : m_.op("mul", {v, by_place(weight)});
  }

 private:
  ValueId number(ValueId like, double v) { return m_.number(like, v); }

  ValueId cubic(ValueId x, bool is_near) {  // Keys' kernel with a = -0.75
    const double a = -0.75;
    auto times = [&](ValueId v, double by) { return m_.op("mul", {v, number(v, by)}); };
    auto plus = [&](ValueId v, double by) { return m_.op("add", {v, number(v, by)}); };
    if (is_near)
      return plus(m_.op("mul", {m_.op("mul", {plus(times(x, a + 2), -(a + 3)), x}), x}), 1);
    return plus(m_.op("mul", {plus(m_.op("mul", {plus(times(x, a), -5 * a), x}), 8 * a), x}),
                -4 * a);
  }

  Tap tap(ValueId at, ValueId weight, int64_t n, double low, double high) {
    const auto last = static_cast<double>(n - 1);
    ValueId inside = ir::kNoValue;
    if (border_ == "zeros") {
      inside =
          m_.op("and", {m_.op("ge", {at, number(at, 0)}), m_.op("le", {at, number(at, last)})});
    }
    if (border_ == "reflection") at = reflected(m_, at, low, high);
    at = m_.op("minimum", {m_.op("maximum", {at, number(at, 0)}), number(at, last)});
    ValueId index = m_.cast(m_.op("round", {at}), ir::DType::kI64);
    index = m_.op("minimum",
                  {m_.op("maximum", {index, number(index, 0)}), number(index, last)});  // NaN too
    return {index, weight, inside};
  }

  Importer& m_;
  std::string mode_, border_;
  bool corners_;
  ValueId x_;
  Dims sizes_;
};

void convert_grid_sample(Importer& m) {
  ValueId x = m.in(0), grid = m.in(1);
  const Dims d = m.dims(x), dg = m.dims(grid);
  std::string mode = m.s("mode", "linear");
  if (mode == "bilinear") mode = "linear";
  if (mode == "bicubic") mode = "cubic";
  const std::string border = m.s("padding_mode", "zeros");
  if (mode != "linear" && mode != "nearest" && mode != "cubic")
    m.refuse("linear, nearest or cubic", mode);
  if (border != "zeros" && border != "border" && border != "reflection")
    m.refuse("zeros, border or reflection", border);
  const size_t n = d.size() < 3 ? 0 : d.size() - 2;
  if (n < 1 || n > 3 || dg.size() != d.size() || dg.back() != Dim(static_cast<int64_t>(n))) {
    m.refuse("a grid of as many coordinates as axes", m.type(grid).str());
  }
  Sampler sampler(m, x, mode, border, m.i("align_corners", 0) != 0);
  const Dims places(dg.begin(), dg.end() - 1);
  std::vector<std::vector<Tap>> taps;
  for (size_t a = 0; a < n; ++a) {  // the last coordinate is that of the first axis
    const auto k = static_cast<int64_t>(n - 1 - a);
    ValueId c =
        m.reshape(m.slice(grid, static_cast<int64_t>(n) + 1, Dim(k), Dim(k + 1), 1), places);
    taps.push_back(sampler.taps(
        m.cast(c, m.dtype(x) == ir::DType::kF64 ? ir::DType::kF64 : ir::DType::kF32), a));
  }
  Dims along(places.size(), Dim(1));
  along[0] = d[0];
  ValueId batch = m.reshape(m.count(d[0]), along), sum = ir::kNoValue;
  std::vector<size_t> at(n, 0);
  for (bool goes_on = true; goes_on;) {
    std::vector<Tap> chosen;
    for (size_t a = 0; a < n; ++a) chosen.push_back(taps[a][at[a]]);
    ValueId v = sampler.read(batch, chosen);
    sum = sum == ir::kNoValue ? v : m.op("add", {sum, v});
    goes_on = false;
    for (size_t a = 0; a < n && !goes_on; ++a) {
      if (++at[a] < taps[a].size())
        goes_on = true;
      else
        at[a] = 0;
    }
  }
  Ints back{0, static_cast<int64_t>(n) + 1};
  for (size_t a = 1; a <= n; ++a) back.push_back(static_cast<int64_t>(a));
  m.out(m.permute(sum, back));
}

void convert_affine_grid(Importer& m) {
  ValueId theta = m.in(0);
  const Ints size = m.integers(1, "a size");
  const size_t n = size.size() < 2 ? 0 : size.size() - 2;
  if (n < 2 || n > 3 || m.rank(theta) != 3) m.refuse("images of 2 or 3 axes", std::to_string(n));
  int64_t count = 1;
  for (size_t a = 0; a < n; ++a) {
    if (size[a + 2] < 1 || size[a + 2] > kMaxSize || (count *= size[a + 2]) > kMaxSize)
      m.refuse("sizes that memory can hold", "others");
  }
  std::vector<double> points;  // x, y, (z,) 1 of each place
  for (int64_t p = 0; p < count; ++p) {
    int64_t rest = p;
    for (size_t a = n; a-- > 0;) {
      const int64_t s = size[a + 2], i = rest % s;
      rest /= s;
      const auto length = static_cast<double>(s), x = static_cast<double>(i);
      points.push_back(m.i("align_corners", 0) == 0 ? (2 * x + 1) / length - 1
                       : s == 1                     ? -1
                                                    : 2 * x / (length - 1) - 1);
    }
    points.push_back(1);
  }
  ValueId base = m.floats(points, {Dim(count), Dim(static_cast<int64_t>(n) + 1)}, m.dtype(theta));
  ValueId y = m.op("matmul", {base, m.permute(theta, {0, 2, 1})});
  Dims shape{m.dims(theta)[0]};
  for (size_t a = 0; a < n; ++a) shape.emplace_back(size[a + 2]);
  shape.emplace_back(static_cast<int64_t>(n));
  m.out(m.reshape(y, shape));
}

}  // namespace

void add_sampling(Table* table) {
  Table& t = *table;
  t["Resize"] = t["Upsample"] = convert_resize;
  t["GridSample"] = convert_grid_sample;
  t["AffineGrid"] = convert_affine_grid;
}

}  // namespace rm::onnx
