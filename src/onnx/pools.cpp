// Pools, and the places of their windows.
#include <algorithm>

#include "onnx/windows.hpp"

namespace rm::onnx {

ir::Attrs windows(const Importer& m, const Dims& x, const Ints& kernel, bool auto_pad) {
  const size_t n = kernel.size();
  if (x.size() != n + 2)
    m.refuse(std::to_string(n) + " spatial axes", std::to_string(x.size() - 2));
  Ints strides = m.ints("strides").value_or(Ints(n, 1));
  Ints dilations = m.ints("dilations").value_or(Ints(n, 1));
  Ints pads = m.ints("pads").value_or(Ints(2 * n, 0));
  const std::string mode = m.s("auto_pad", "NOTSET");
  if (strides.size() != n || dilations.size() != n || pads.size() != 2 * n) {
    m.refuse("strides, dilations and pads for each spatial axis", "another number of them");
  }
  for (const Ints& list : {kernel, strides, dilations}) {
    for (int64_t v : list) {
      if (v < 1 || v > (int64_t{1} << 30)) m.refuse("windows of at least 1", std::to_string(v));
    }
  }
  if (auto_pad && (mode == "SAME_UPPER" || mode == "SAME_LOWER")) {
    for (size_t k = 0; k < n; ++k) {
      const int64_t size = m.fixed(x[k + 2]), stride = strides[k];
      const int64_t steps = (size + stride - 1) / stride;
      const int64_t reach = (kernel[k] - 1) * dilations[k] + 1;
      const int64_t total = std::max<int64_t>((steps - 1) * stride + reach - size, 0);
      pads[k] = mode == "SAME_UPPER" ? total / 2 : total - total / 2;
      pads[k + n] = total - pads[k];
    }
  } else if (mode == "VALID") {
    pads.assign(2 * n, 0);
  }
  return {{"stride", strides}, {"dilation", dilations}, {"padding", pads}};
}

namespace {

// With ceil_mode windows may reach over the end, but start in the input or the padding before it.
void reach_over(const Importer& m, const Dims& x, const Ints& kernel, ir::Attrs* attrs) {
  Ints& pads = std::get<Ints>(attrs->at("padding"));
  const Ints &stride = std::get<Ints>(attrs->at("stride")),
             &dilation = std::get<Ints>(attrs->at("dilation"));
  const size_t n = kernel.size();
  for (size_t k = 0; k < n; ++k) {
    const int64_t size = m.fixed(x[k + 2]), reach = (kernel[k] - 1) * dilation[k] + 1;
    const int64_t room = size + pads[k] + pads[k + n] - reach;
    if (room < 0) m.refuse("windows that fit", "larger ones");
    int64_t last = (room + stride[k] - 1) / stride[k];
    if (last * stride[k] >= size + pads[k]) --last;
    pads[k + n] = last * stride[k] + reach - size - pads[k];
  }
}

ValueId bordered(Importer& m, ValueId x, const Ints& pads, size_t n) {
  for (size_t k = 0; k < n; ++k) {
    auto block = [&](int64_t size) {
      Dims shape = m.dims(x);
      shape[k + 2] = Dim(size);
      return m.expand(m.number(x, 0), shape);
    };
    std::vector<ValueId> parts;
    if (pads[k] > 0) parts.push_back(block(pads[k]));
    parts.push_back(x);
    if (pads[k + n] > 0) parts.push_back(block(pads[k + n]));
    x = m.concat(parts, static_cast<int64_t>(k + 2));
  }
  return x;
}

ValueId pooled(Importer& m, ValueId x, const std::string& kind, bool pads_count) {
  const Ints kernel = m.ints("kernel_shape").value_or(Ints{});
  if (kernel.empty()) m.refuse("a kernel", "none");
  const size_t n = kernel.size();
  ir::Attrs attrs = windows(m, m.dims(x), kernel, true);
  const Ints pads = std::get<Ints>(attrs.at("padding"));
  if (m.i("ceil_mode", 0) != 0) reach_over(m, m.dims(x), kernel, &attrs);
  if (pads_count) {  // zeros that count are elements; what ceil_mode adds is not
    const bool has_negative =
        std::any_of(pads.begin(), pads.end(), [](int64_t p) { return p < 0; });
    if (has_negative) m.refuse("pads of at least 0", "others");
    x = bordered(m, x, pads, n);
    Ints& rest = std::get<Ints>(attrs.at("padding"));
    for (size_t k = 0; k < 2 * n; ++k) rest[k] -= pads[k];
  }
  attrs["kernel"] = kernel;
  attrs["kind"] = kind == "max" ? kind : std::string("mean");
  if (kind == "max" && m.wants(1)) m.out(largest_places(m, x, kernel, attrs), 1);
  if (kind == "mean") attrs["count_include_pad"] = int64_t{0};
  if (kind == "sum") attrs["divisor"] = int64_t{1};
  return m.op("pool", {x}, attrs);
}

Converter pool(std::string kind) {
  return [kind](Importer& m) {
    ValueId x = m.in(0);
    const ir::DType dtype = m.dtype(x);
    const bool is_small = dtype == ir::DType::kI8 || dtype == ir::DType::kU8;
    if (!ir::is_floating(dtype) && !(kind == "max" && is_small))
      m.refuse("floats", m.type(x).str());
    ValueId y = pooled(m, is_small ? m.cast(x, ir::DType::kF32) : x, kind,
                       kind == "mean" && m.i("count_include_pad", 0) != 0);
    m.out(m.cast(y, dtype));
  };
}

// The p-th root of the sum of p-th powers.
void convert_lp_pool(Importer& m) {
  ValueId x = m.in(0);
  const int64_t p = m.i("p", 2);
  if (p < 1) m.refuse("p of at least 1", std::to_string(p));
  ValueId powers = p == 2 ? m.op("mul", {x, x}) : m.op("abs", {x});
  if (p > 2) powers = m.op("pow", {powers, m.number(x, static_cast<double>(p))});
  ValueId sum = pooled(m, powers, "sum", false);
  if (p == 1) return m.out(sum);
  m.out(p == 2 ? m.op("sqrt", {sum})
               : m.op("pow", {sum, m.number(x, 1.0 / static_cast<double>(p))}));
}

Converter global_pool(std::string kind) {
  return [kind](Importer& m) {
    ValueId x = m.in(0);
    Ints axes;
    for (size_t k = 2; k < m.rank(x); ++k) axes.push_back(static_cast<int64_t>(k));
    m.out(m.reduce(kind, x, axes, true));
  };
}

// Patches written back to their places, sums where they overlap: a transposed convolution whose
// kernel of each channel writes element k of a patch to place k.
void convert_col2im(Importer& m) {
  ValueId x = m.in(0);
  const Ints image = m.integers(1, "a size"), block = m.integers(2, "a block");
  const size_t n = image.size();
  int64_t elements = 1;
  for (int64_t b : block) {
    if (b < 1 || b > 4096) m.refuse("blocks up to 4096", std::to_string(b));
    elements *= b;
    if (elements > 4096) m.refuse("blocks up to 4096", std::to_string(elements));
  }
  const Ints stride = m.ints("strides").value_or(Ints(n, 1)),
             dilation = m.ints("dilations").value_or(Ints(n, 1)),
             pads = m.ints("pads").value_or(Ints(2 * n, 0));
  const Dims d = m.dims(x);
  if (d.size() != 3 || n < 1 || n > 3 || block.size() != n || stride.size() != n ||
      dilation.size() != n || pads.size() != 2 * n) {
    m.refuse("patches of 1 to 3 axes", m.type(x).str());
  }
  const int64_t channels = m.fixed(d[1]) / elements;
  Dims places{d[0], d[1]}, kernel{d[1], Dim(1)};
  Ints extra;
  for (size_t k = 0; k < n; ++k) {
    const int64_t room = image[k] + pads[k] + pads[k + n] - dilation[k] * (block[k] - 1) - 1;
    if (stride[k] < 1 || room < 0) m.refuse("blocks inside the image", "others");
    places.emplace_back(room / stride[k] + 1);
    kernel.emplace_back(block[k]);
    extra.push_back(room % stride[k]);
  }
  if (channels < 1 || channels > (int64_t{1} << 22) / (elements * elements)) {
    m.refuse("kernels of at most 4194304 elements", std::to_string(channels) + " channels");
  }
  std::vector<double> ones(static_cast<size_t>(channels * elements * elements), 0);
  for (int64_t c = 0; c < channels * elements; ++c)
    ones[static_cast<size_t>(c * elements + c % elements)] = 1;
  m.out(m.op("conv", {m.reshape(x, places), m.floats(ones, kernel, m.dtype(x))},
             {{"transposed", int64_t{1}},
              {"groups", channels},
              {"stride", stride},
              {"dilation", dilation},
              {"padding", pads},
              {"output_padding", extra}}));
}

}  // namespace

void add_pools(Table* table) {
  Table& t = *table;
  t["MaxPool"] = pool("max");
  t["AveragePool"] = pool("mean");
  t["LpPool"] = convert_lp_pool;
  t["Col2Im"] = convert_col2im;
  t["GlobalAveragePool"] = global_pool("mean");
  t["GlobalMaxPool"] = global_pool("max");
}

}  // namespace rm::onnx
