// Products are sampled so that every row and every column of the result is looked at: a fault of a
// tile's edge, of a tail or of a stream shows in a whole row or a whole column.
#include "selfcheck/expected.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ir/scalar.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/registry.hpp"
#include "selfcheck/fused.hpp"

namespace rm::selfcheck {
namespace {

using ir::DType;
using ops::HostTensor;
using Operands = std::vector<const HostTensor*>;
using Places = std::vector<int64_t>;

constexpr double kWholeProducts = 150e3;  // multiply-adds the reference does at once
constexpr int64_t kQueries = 6;           // of sdpa

Places iota(int64_t n) {
  Places out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = i;
  return out;
}

/// The first, the last, and some between.
Places spread(int64_t size, int64_t count) {
  if (size <= count) return iota(size);
  Places out;
  for (int64_t i = 0; i < count; ++i) out.push_back(i * (size - 1) / (count - 1));
  return out;
}

/// The places along one axis.
HostTensor pick(const HostTensor& t, size_t axis, const Places& places) {
  const ops::AxisSplit s = ops::split_at(t.type.dims, axis);
  ir::TensorType type = t.type;
  type.dims[axis] = static_cast<int64_t>(places.size());
  HostTensor out = ops::zeros(type);
  const size_t run = static_cast<size_t>(s.inner) * ir::size_bytes(type.dtype);
  char* to = out.bytes.data();
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t at : places) {
      std::memcpy(to, t.at((o * s.size + at) * s.inner), run);
      to += run;
    }
  }
  return out;
}

/// Elements of the whole result that `places` along `axis` are, row-major.
Places elements_of(const ir::TensorType& whole, size_t axis, const Places& places) {
  const ops::AxisSplit s = ops::split_at(whole.dims, axis);
  Places out;
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t at : places) {
      for (int64_t i = 0; i < s.inner; ++i) out.push_back((o * s.size + at) * s.inner + i);
    }
  }
  return out;
}

ir::Node node_of(const Shape& shape) {
  ir::Node node;
  node.op = shape.op;
  node.attrs = shape.attrs;
  return node;
}

class Reference {
 public:
  Reference(const Shape& shape, const std::vector<Filled>& inputs, const std::vector<Filled>& before)
      : shape_(shape), node_(node_of(shape)), inputs_(inputs), before_(before) {
    for (const Filled& f : inputs) operands_.push_back(f.memory != nullptr ? &f.values : nullptr);
    // Trailing absent operands may be missing; references look at present ones only.
    for (size_t i = 0; i < before.size(); ++i) {
      if (before[i].memory != nullptr) types_.push_back(before[i].values.type);
    }
  }

  std::vector<Part> run() {
    if (is_fused(shape_.op)) return expected_fused(shape_, inputs_, before_);
    if (shape_.op == "copy") return {{0, *operands_[0], iota(operands_[0]->size())}};
    if (shape_.op == "gemm" && is_large()) return gemm();
    if (shape_.op == "grouped_gemm" && is_large()) return grouped_gemm();
    if (shape_.op == "quant_linear" && is_large()) return quant_linear();
    if (shape_.op == "conv" && node_.i_or("groups", 1) == 1) return conv();
    if (shape_.op == "sdpa") return sdpa();
    if (shape_.op == "sdpa_backward") return sdpa_backward();
    if (shape_.op == "index_copy") {
      Operands all{&before_[0].values};
      all.insert(all.end(), operands_.begin(), operands_.end());
      return whole(all);
    }
    return whole(operands_);
  }

 private:
  const ir::TensorType& out() const { return types_[0]; }

  bool is_large() const {
    const auto k = static_cast<double>(operands_[0]->type.dims.back().value());
    return out().rank() >= 2 && static_cast<double>(out().num_elements()) * k > kWholeProducts;
  }

  std::vector<Part> whole(const Operands& operands) const {
    std::vector<HostTensor> results = ops::get(shape_.op).reference(node_, operands, types_);
    std::vector<Part> parts;
    for (size_t i = 0; i < results.size(); ++i) {
      Places all = iota(results[i].size());
      parts.push_back({i, std::move(results[i]), std::move(all)});
    }
    return parts;
  }

  /// The reference on operands cut along axes; nullptr in `cut` keeps an operand whole.
  Part part(const std::vector<HostTensor>& cut, size_t axis, const Places& places) const {
    Operands operands;
    for (size_t i = 0; i < operands_.size(); ++i) {
      const bool use = operands_[i] != nullptr && !cut[i].type.dims.empty();
      operands.push_back(use ? &cut[i] : operands_[i]);
    }
    ir::TensorType type = out();
    type.dims[axis] = static_cast<int64_t>(places.size());
    return {0, ops::get(shape_.op).reference(node_, operands, {type})[0],
            elements_of(out(), axis, places)};
  }

  bool has(size_t i) const { return i < operands_.size() && operands_[i] != nullptr; }

  std::vector<Part> gemm() const {
    const size_t m = out().rank() - 2, n = m + 1;
    const Places rows = spread(out().dims[m].value(), 3), columns = spread(out().dims[n].value(), 3);
    std::vector<HostTensor> by_row(operands_.size()), by_column(operands_.size());
    by_row[0] = pick(*operands_[0], m, rows);
    if (has(3)) by_row[3] = pick(*operands_[3], m, rows);
    const size_t b_rank = operands_[1]->type.rank();
    const bool transposed = node_.i_or("trans_b", 0) != 0;
    by_column[1] = pick(*operands_[1], b_rank - (transposed ? 2 : 1), columns);
    if (has(2)) by_column[2] = pick(*operands_[2], 0, columns);
    if (has(3)) by_column[3] = pick(*operands_[3], n, columns);
    return {part(by_row, m, rows), part(by_column, n, columns)};
  }

  /// Some columns of all rows, and all columns of some rows, whose groups end elsewhere then.
  std::vector<Part> grouped_gemm() const {
    const Places rows = spread(out().dims[0].value(), 4), columns = spread(out().dims[1].value(), 3);
    std::vector<HostTensor> by_row(3), by_column(3);
    by_column[1] = pick(*operands_[1], 2, columns);
    by_row[0] = pick(*operands_[0], 0, rows);
    by_row[2] = *operands_[2];
    for (int64_t e = 0; e < by_row[2].size(); ++e) {
      const DType type = by_row[2].type.dtype;
      const int64_t end = ir::load_int(type, by_row[2].at(e));
      ir::store_int(type, by_row[2].at(e), std::lower_bound(rows.begin(), rows.end(), end) - rows.begin());
    }
    return {part(by_row, 0, rows), part(by_column, 1, columns)};
  }

  /// Rows of the weight lie in tiles of 8: the first of them, and what is behind the last.
  std::vector<Part> quant_linear() const {
    const size_t m = out().rank() - 2, n = m + 1;
    const int64_t width = out().dims[n].value();
    const Places rows = spread(out().dims[m].value(), 3);
    std::vector<HostTensor> by_row(operands_.size());
    by_row[0] = pick(*operands_[0], m, rows);
    if (has(5)) by_row[5] = pick(*operands_[5], m, rows);
    std::vector<Part> parts{part(by_row, m, rows)};
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, std::min<int64_t>(8, width)},
                                     std::pair<int64_t, int64_t>{width / 8 * 8, width}}) {
      if (begin == end) continue;
      Places columns;
      for (int64_t j = begin; j < end; ++j) columns.push_back(j);
      std::vector<HostTensor> cut(operands_.size());
      for (size_t i : {size_t{1}, size_t{2}, size_t{3}, size_t{4}}) {
        const size_t axis = i == 2 && node_.i_or("pairs", 0) != 0 ? 1 : 0;
        if (has(i)) cut[i] = pick(*operands_[i], axis, columns);
      }
      if (has(5)) cut[5] = pick(*operands_[5], n, columns);
      parts.push_back(part(cut, n, columns));
    }
    return parts;
  }

  /// Some channels at all places, and all channels at the first places along the first axis.
  std::vector<Part> conv() {
    const bool turned = node_.i_or("transposed", 0) != 0;
    const Places channels = spread(out().dims[1].value(), 4);
    std::vector<HostTensor> cut(operands_.size());
    cut[1] = pick(*operands_[1], turned ? 1 : 0, channels);
    if (has(2)) cut[2] = pick(*operands_[2], 0, channels);
    if (has(3)) cut[3] = pick(*operands_[3], 1, channels);
    std::vector<Part> parts{part(cut, 1, channels)};
    const size_t axes = out().rank() - 2;
    const int64_t stride = int_at("stride", 0, 1), reach = int_at("dilation", 0, 1) *
                           (operands_[1]->type.dims[2].value() - 1) + 1;
    const int64_t begin = int_at("padding", 0, 0), size = operands_[0]->type.dims[2].value();
    if (turned || reach <= begin || stride < 1) return parts;
    const int64_t seen = std::min(size, reach - begin);
    std::vector<HostTensor> first(operands_.size());
    first[0] = pick(*operands_[0], 2, iota(seen));
    if (has(3)) first[3] = pick(*operands_[3], 2, {0});
    std::vector<int64_t> padding(2 * axes, 0);
    if (node_.has("padding")) padding = node_.ints("padding");
    padding[axes] = reach - begin - seen;
    node_.attrs["padding"] = padding;
    parts.push_back(part(first, 2, {0}));
    return parts;
  }

  int64_t int_at(const char* name, size_t at, int64_t otherwise) const {
    return node_.has(name) ? node_.ints(name)[at] : otherwise;
  }

  /// sdpa's mask for some queries and some keys. Where it is causal that becomes a part of it: a
  /// place that was picked is no longer its row or column. Without dims where there is none.
  HostTensor attention_mask(const Places& rows, const Places& keys) const {
    const bool causal = node_.i_or("is_causal", 0) != 0;
    HostTensor mask;
    if (has(3)) {
      mask = pick(pick(*operands_[3], 2, rows), 3, keys);
    } else if (causal) {
      const ir::Dims& q = operands_[0]->type.dims;
      mask = ops::zeros({DType::kBool, {q[0], q[1], static_cast<int64_t>(rows.size()),
                                        static_cast<int64_t>(keys.size())}});
      std::fill(mask.bytes.begin(), mask.bytes.end(), '\1');
    }
    const auto count = static_cast<int64_t>(rows.size()), width = static_cast<int64_t>(keys.size());
    for (int64_t i = 0; causal && i < mask.size(); ++i) {
      const int64_t key = keys[static_cast<size_t>(i % width)];
      if (key <= rows[static_cast<size_t>(i / width % count)]) continue;
      ir::store_element(mask.type.dtype, mask.at(i), mask.type.dtype == DType::kBool ? 0 : -INFINITY);
    }
    return mask;
  }

  /// Some queries over all keys.
  std::vector<Part> sdpa() {
    const int64_t s = out().dims[2].value(), t = operands_[1]->type.dims[2].value();
    const Places rows = spread(s, kQueries);
    if (static_cast<int64_t>(rows.size()) == s) return whole(operands_);
    const HostTensor q = pick(*operands_[0], 2, rows), mask = attention_mask(rows, iota(t));
    node_.attrs["is_causal"] = int64_t{0};
    Operands operands{&q, operands_[1], operands_[2]};
    if (!mask.type.dims.empty() || has(4)) operands.push_back(mask.type.dims.empty() ? nullptr : &mask);
    if (has(4)) operands.push_back(operands_[4]);
    std::vector<ir::TensorType> types = types_;
    for (ir::TensorType& type : types) type.dims[2] = static_cast<int64_t>(rows.size());
    std::vector<HostTensor> results = ops::get("sdpa").reference(node_, operands, types);
    std::vector<Part> parts;
    for (size_t i = 0; i < results.size(); ++i) {
      parts.push_back({i, std::move(results[i]), elements_of(types_[i], 2, rows)});
    }
    return parts;
  }

  /// Some queries over all keys, and some keys under all queries: the log-sum-exp of a row is given.
  /// With a last key the places of keys count, and the whole is made.
  std::vector<Part> sdpa_backward() {
    const int64_t s = operands_[0]->type.dims[2].value(), t = operands_[1]->type.dims[2].value();
    const Places rows = spread(s, kQueries), keys = spread(t, kQueries);
    const bool all = static_cast<int64_t>(rows.size()) == s && static_cast<int64_t>(keys.size()) == t;
    if (all || has(4)) return whole(operands_);
    const HostTensor row_mask = attention_mask(rows, iota(t)), key_mask = attention_mask(iota(s), keys);
    node_.attrs["is_causal"] = int64_t{0};
    std::vector<Part> parts;
    const auto add = [&](const Places& places, const std::vector<size_t>& cut, const HostTensor& mask,
                         const std::vector<size_t>& results) {
      std::vector<HostTensor> picked(operands_.size());
      Operands operands = operands_;
      for (size_t i : cut) picked[i] = pick(*operands_[i], 2, places), operands[i] = &picked[i];
      operands[3] = mask.type.dims.empty() ? nullptr : &mask;
      std::vector<ir::TensorType> types = types_;
      for (size_t i : results) types[i].dims[2] = static_cast<int64_t>(places.size());
      std::vector<HostTensor> made = ops::get("sdpa_backward").reference(node_, operands, types);
      for (size_t i : results) parts.push_back({i, std::move(made[i]), elements_of(types_[i], 2, places)});
    };
    add(rows, {0, 5, 6, 7}, row_mask, {0});
    add(keys, {1, 2}, key_mask, {1, 2});
    return parts;
  }

  const Shape& shape_;
  ir::Node node_;
  const std::vector<Filled>&inputs_, &before_;
  Operands operands_;
  std::vector<ir::TensorType> types_;
};

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 0x1p-52;
    case DType::kF32: return 0x1p-23;
    case DType::kF16: return 0x1p-10;
    case DType::kBF16: return 0x1p-7;
    default: return 0;
  }
}

/// Operators that only move or choose elements give them bit for bit, quantize its integers and uniform
/// its numbers too.
bool is_exact(const Shape& shape, DType dtype) {
  if (!ir::is_floating(dtype)) return true;
  for (const char* op : {"copy", "gather", "index", "index_copy", "embedding", "sort", "quantize",
                         "uniform", "check"}) {
    if (shape.op == op) return true;
  }
  return false;
}

struct Tolerance {
  double relative, absolute;  // the latter a part of the largest result
};

/// Whether an instruction of an ewise program computes in float32, whatever its result is stored as.
bool computes_in_single(const Shape& shape) {
  const auto code = shape.op == "ewise" ? shape.attrs.find("code") : shape.attrs.end();
  if (code == shape.attrs.end()) return false;
  const auto& numbers = std::get<std::vector<int64_t>>(code->second);
  for (size_t i = 1; i < numbers.size(); i += ops::kEwiseFields) {
    if (numbers[i] == 0) return true;
  }
  return false;
}

Tolerance tolerance(const Shape& shape, DType dtype) {
  const bool is_double = dtype == DType::kF64 && !computes_in_single(shape);
  const double rounding = 2 * epsilon(dtype), single = is_double ? 0x1p-52 : 0x1p-23;
  // Programs of several functions, each good to some units in the last place.
  if (shape.op == "ewise" || shape.op == "gemm_ewise" || shape.op == "small_steps") return {std::max(rounding, 2048 * single), 512 * single};
  // The weight may be rounded to x's type first: random errors of half a rounding each.
  const bool halves = dtype == DType::kBF16 || attr_or<int64_t>(shape, "pairs", 0) != 0;
  if (shape.op == "quant_linear" && halves) {
    return {std::max(rounding, 0x1p-14), std::max(epsilon(dtype) / 4, 0x1p-12)};
  }
  // x may be rounded to 15 bits within a group.
  if (shape.op == "quant_linear") return {std::max(rounding, 0x1p-14), 0x1p-12};
  // Weights of keys may be rounded to the values' type.
  if ((shape.op == "sdpa" || shape.op == "append_sdpa" || shape.op == "sdpa_backward") && ir::size_bytes(dtype) == 2) {
    return {rounding, epsilon(dtype)};
  }
  // So may what a layer norm gives, where products take it in 16 bits.
  if (shape.op == "linears" && attr_or<int64_t>(shape, "centred", 0) != 0 && ir::size_bytes(dtype) == 2) {
    return {rounding, epsilon(dtype) / 2};
  }
  // Libraries may transform tiles (Winograd) and lose some bits there.
  if (shape.op == "conv") {
    if (attr_or<int64_t>(shape, "tf32", 0) != 0) {
      return {2 * epsilon(DType::kF16), 2 * epsilon(DType::kF16)};
    }
    return {std::max(rounding, 16 * single), 1024 * single};
  }
  return {std::max(rounding, 16 * single), 64 * single};
}

}  // namespace

std::vector<Part> expected(const Shape& shape, const std::vector<Filled>& inputs,
                           const std::vector<Filled>& before) {
  return Reference(shape, inputs, before).run();
}

std::vector<int64_t> differences(const Shape& shape, const Part& want, const HostTensor& got) {
  std::vector<int64_t> out;
  const DType dtype = want.values.type.dtype;
  const size_t item = ir::size_bytes(dtype);
  const bool exact = is_exact(shape, dtype);
  double largest = 1;
  if (!exact) {
    for (int64_t i = 0; i < want.values.size(); ++i) {
      const double x = std::fabs(ir::load_element(dtype, want.values.at(i)));
      if (std::isfinite(x)) largest = std::max(largest, x);
    }
  }
  const Tolerance allowed = tolerance(shape, dtype);
  for (size_t i = 0; i < want.elements.size(); ++i) {
    const char* a = want.values.at(static_cast<int64_t>(i));
    const char* b = got.at(want.elements[i]);
    if (std::memcmp(a, b, item) == 0) continue;
    const double x = ir::load_element(dtype, a), y = ir::load_element(dtype, b);
    if (std::isnan(x) && std::isnan(y)) continue;
    if (!exact && std::fabs(x - y) <= allowed.relative * std::fabs(x) + allowed.absolute * std::min(largest, 1e3)) continue;
    out.push_back(want.elements[i]);
  }
  return out;
}

}  // namespace rm::selfcheck
