// Operators over places of images: where the largest element of a window lies, elements written
// back there, and convolutions whose places are moved by numbers that the model computes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "onnx/windows.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxPlaces = int64_t{1} << 22;  // of all windows of an image

int64_t product_of(const Ints& sizes) {
  int64_t out = 1;
  for (int64_t n : sizes) {
    if (n < 0 || (n > 0 && out > kMaxPlaces / n)) return kMaxPlaces + 1;
    out *= n;
  }
  return out;
}

struct Windows {
  Ints size, out;  // spatial sizes of the image and of the result
  Ints kernel, stride, dilation, pads;
  int64_t windows, elements;  // of an image, of a window
};

Windows read_windows(Importer& m, const Dims& d, const Ints& kernel, const ir::Attrs& attrs) {
  Windows w;
  w.kernel = kernel;
  w.stride = std::get<Ints>(attrs.at("stride"));
  w.dilation = std::get<Ints>(attrs.at("dilation"));
  w.pads = std::get<Ints>(attrs.at("padding"));
  for (size_t k = 0; k < kernel.size(); ++k) {
    w.size.push_back(m.fixed(d[k + 2]));
    const int64_t reach = (kernel[k] - 1) * w.dilation[k] + 1;
    const int64_t room = w.size[k] + w.pads[k] + w.pads[k + kernel.size()] - reach;
    if (room < 0) m.refuse("windows that fit", "larger ones");
    w.out.push_back(room / w.stride[k] + 1);
  }
  w.windows = product_of(w.out);
  w.elements = product_of(kernel);
  if (w.windows > kMaxPlaces || w.elements > kMaxPlaces || w.windows * w.elements > kMaxPlaces ||
      product_of(w.size) > kMaxPlaces) {
    m.refuse("images of at most " + std::to_string(kMaxPlaces) + " places of windows", "more");
  }
  return w;
}

// Calls f(window, element, coordinates) in row order.
template <class F>
void for_each_place(const Windows& w, F&& f) {
  const size_t n = w.kernel.size();
  Ints at(n);
  for (int64_t o = 0; o < w.windows; ++o) {
    for (int64_t e = 0; e < w.elements; ++e) {
      int64_t window = o, element = e;
      for (size_t k = n; k-- > 0;) {
        at[k] = window % w.out[k] * w.stride[k] - w.pads[k] + element % w.kernel[k] * w.dilation[k];
        window /= w.out[k];
        element /= w.kernel[k];
      }
      f(o, e, at);
    }
  }
}

// The number of a place in row order, or with the first axis running fastest; -1 outside.
int64_t number_of(const Windows& w, const Ints& at, bool first_fastest) {
  int64_t number = 0;
  for (size_t k = 0; k < at.size(); ++k) {
    const size_t axis = first_fastest ? at.size() - 1 - k : k;
    if (at[axis] < 0 || at[axis] >= w.size[axis]) return -1;
    number = number * w.size[axis] + at[axis];
  }
  return number;
}

}  // namespace

// The elements of each window beside each other, those outside the image lowest; the first of the
// largest says where it lies.
ValueId largest_places(Importer& m, ValueId x, const Ints& kernel, const ir::Attrs& attrs) {
  const Dims d = m.dims(x);
  const Windows w = read_windows(m, d, kernel, attrs);
  const bool first_fastest = m.i("storage_order", 0) != 0;
  const int64_t places = product_of(w.size);
  Ints read, named;
  for_each_place(w, [&](int64_t, int64_t, const Ints& at) {
    const int64_t number = number_of(w, at, false);
    read.push_back(number < 0 ? places : number);
    named.push_back(number < 0 ? 0 : number_of(w, at, first_fastest));
  });
  ValueId flat = m.reshape(x, {d[0], d[1], Dim(places)});
  ValueId lowest = m.number(x, -std::numeric_limits<double>::infinity());
  flat = m.concat({flat, m.expand(lowest, {d[0], d[1], Dim(1)})}, 2);
  ValueId beside =
      m.reshape(m.take(flat, 2, m.integers(read)), {d[0], d[1], Dim(w.windows), Dim(w.elements)});
  ValueId largest = m.reduce("argmax", beside, {3}, false);
  Ints starts;
  for (int64_t o = 0; o < w.windows; ++o) starts.push_back(o * w.elements);
  ValueId at =
      m.op("add", {largest, m.reshape(m.integers(starts), {Dim(1), Dim(1), Dim(w.windows)})});
  ValueId within = m.take(m.integers(named), 0, at);
  ValueId image = m.reshape(m.count(d[0] * d[1]), {d[0], d[1], Dim(1)});
  ValueId all =
      m.op("add", {within, m.op("mul", {image, m.number(image, static_cast<double>(places))})});
  Dims shape{d[0], d[1]};
  for (int64_t n : w.out) shape.emplace_back(n);
  return m.reshape(all, shape);
}

namespace {

void convert_unpool(Importer& m) {
  ValueId x = m.in(0), index = m.cast(m.in(1), ir::DType::kI64);
  if (m.has(2)) m.refuse("MaxUnpool without a shape of its result", "one");
  const Ints kernel = m.ints("kernel_shape").value_or(Ints{});
  const ir::Attrs attrs = windows(m, m.dims(x), kernel, false);
  const Ints &stride = std::get<Ints>(attrs.at("stride")),
             &pads = std::get<Ints>(attrs.at("padding"));
  Dims shape = m.dims(x);
  for (size_t k = 0; k < kernel.size(); ++k) {
    const int64_t n =
        (m.fixed(shape[k + 2]) - 1) * stride[k] + kernel[k] - pads[k] - pads[k + kernel.size()];
    if (n < 1 || n > kMaxPlaces) m.refuse("sizes of at least 1", std::to_string(n));
    shape[k + 2] = Dim(n);
  }
  ValueId empty = m.expand(m.number(x, 0), {ir::product(shape)});
  const Dim given = ir::product(m.dims(x));
  m.out(m.reshape(m.op("scatter", {empty, m.reshape(index, {given}), m.reshape(x, {given})},
                       {{"axis", int64_t{0}}, {"kind", std::string("set")}}),
                  shape));
}

// Sizes of a convolution whose windows are moved by offsets: [N, groups of offsets, K, OH, OW].
struct Moved {
  Windows w;
  Dim batch, channels, groups;
};

// Where the windows read along an axis (0: rows, 1: columns), as floats.
ValueId moved(Importer& m, const Moved& c, ValueId offset, int64_t axis) {
  std::vector<double> start(static_cast<size_t>(c.w.windows * c.w.elements));
  for_each_place(c.w, [&](int64_t o, int64_t e, const Ints& at) {
    start[static_cast<size_t>(e * c.w.windows + o)] =
        static_cast<double>(at[static_cast<size_t>(axis)]);
  });
  const Dim k(c.w.elements), o(c.w.windows);
  ValueId by = m.reshape(offset, {c.batch * c.groups, k, Dim(2), o});
  by = m.reshape(m.slice(by, 2, Dim(axis), Dim(axis + 1), 1), {c.batch * c.groups, k, o});
  return m.op("add", {by, m.floats(start, {Dim(1), k, o}, m.dtype(offset))});
}

// The image between its elements, 0 outside: [N * groups, K * O, C / groups].
ValueId between(Importer& m, const Moved& c, ValueId x, ValueId row, ValueId column) {
  const Dim batch = c.batch * c.groups, each = Dim::floordiv(c.channels, c.groups);
  const int64_t height = c.w.size[0], width = c.w.size[1];
  ValueId image = m.permute(m.reshape(x, {batch, each, Dim(height * width)}), {0, 2, 1});
  ValueId first = m.reshape(m.count(batch), {batch, Dim(1)}), sum = ir::kNoValue;
  const Dim n(c.w.elements * c.w.windows);
  const auto number = [&](ValueId like, double v) { return m.number(like, v); };
  for (int64_t corner = 0; corner < 4; ++corner) {
    ValueId weight = ir::kNoValue, inside = ir::kNoValue, place = ir::kNoValue;
    for (int64_t axis = 0; axis < 2; ++axis) {
      ValueId at = axis == 0 ? row : column;
      const double last = static_cast<double>(axis == 0 ? height : width) - 1;
      ValueId base = m.op("floor", {at}), part = m.op("sub", {at, base});
      if ((corner >> axis) % 2 != 0) {
        base = m.op("add", {base, number(base, 1)});
      } else {
        part = m.op("sub", {number(part, 1), part});
      }
      ValueId is_in = m.op(
          "and", {m.op("ge", {base, number(base, 0)}), m.op("le", {base, number(base, last)})});
      ValueId held =
          m.op("minimum", {m.op("maximum", {base, number(base, 0)}), number(base, last)});
      ValueId index = m.cast(held, ir::DType::kI64);
      index = m.op("minimum", {m.op("maximum", {index, number(index, 0)}), number(index, last)});
      weight = axis == 0 ? part : m.op("mul", {weight, part});
      inside = axis == 0 ? is_in : m.op("and", {inside, is_in});
      place = axis == 0
                  ? index
                  : m.op("add",
                         {m.op("mul", {place, number(place, static_cast<double>(width))}), index});
    }
    ValueId read =
        m.op("index", {image, first, m.reshape(place, {batch, n})}, {{"axes", Ints{0, 1}}});
    weight = m.op("where", {inside, weight, number(weight, 0)});
    ValueId part = m.op("mul", {read, m.reshape(weight, {batch, n, Dim(1)})});
    sum = corner == 0 ? part : m.op("add", {sum, part});
  }
  return sum;
}

void convert_deformed(Importer& m) {
  ValueId x = m.in(0), weight = m.in(1), offset = m.in(2);
  const Dims d = m.dims(x), dw = m.dims(weight);
  if (d.size() != 4 || dw.size() != 4 || m.rank(offset) != 4) m.refuse("images", m.type(x).str());
  const Ints kernel{m.fixed(dw[2]), m.fixed(dw[3])};
  const int64_t groups = m.i("group", 1), moving = m.i("offset_group", 1);
  if (groups < 1 || moving < 1 || m.fixed(d[1]) % groups != 0 || m.fixed(d[1]) % moving != 0 ||
      m.fixed(dw[0]) % groups != 0 || m.fixed(dw[1]) * groups != m.fixed(d[1])) {
    m.refuse("groups that divide the channels", std::to_string(groups));
  }
  const Moved c{read_windows(m, d, kernel, windows(m, d, kernel, false)), d[0], d[1], Dim(moving)};
  const Dim k(c.w.elements), o(c.w.windows), each = Dim::floordiv(d[1], Dim(moving));
  ValueId y = between(m, c, x, moved(m, c, offset, 0), moved(m, c, offset, 1));
  if (m.has(4)) y = m.op("mul", {y, m.reshape(m.in(4), {d[0] * Dim(moving), k * o, Dim(1)})});
  y = m.permute(m.reshape(y, {d[0], Dim(moving), k, o, each}), {0, 1, 4, 2, 3});
  const Dim terms = Dim::floordiv(d[1], Dim(groups)) * k, rows = Dim::floordiv(dw[0], Dim(groups));
  y = m.op("matmul", {m.reshape(weight, {Dim(1), Dim(groups), rows, terms}),
                      m.reshape(y, {d[0], Dim(groups), terms, o})});
  y = m.reshape(y, {d[0], dw[0], Dim(c.w.out[0]), Dim(c.w.out[1])});
  if (m.has(3)) y = m.op("add", {y, m.reshape(m.in(3), {Dim(1), dw[0], Dim(1), Dim(1)})});
  m.out(y);
}

}  // namespace

void add_places(Table* table) {
  Table& t = *table;
  t["MaxUnpool"] = convert_unpool;
  t["DeformConv"] = convert_deformed;
}

}  // namespace rm::onnx
