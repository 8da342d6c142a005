// Which values an operand of which operator may have is written down here, and nowhere else.
#include "selfcheck/operands.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "ir/scalar.hpp"
#include "ops/registry.hpp"
#include "selfcheck/fused.hpp"

namespace rm::selfcheck {
namespace {

using ir::DType;
using ir::Layout;
using ops::HostTensor;

ir::TensorType type_of(const Layout& layout) {
  ir::TensorType type{layout.dtype, {}};
  for (int64_t d : layout.dims) type.dims.emplace_back(d);
  return type;
}

/// Multiples of 1/unit up to most/unit on both sides.
void fill_floats(HostTensor& t, Random& random, int64_t most, double unit) {
  double values[257];
  for (int64_t i = -most; i <= most; ++i) values[i + most] = static_cast<double>(i) / unit;
  const int64_t n = t.size(), span = 2 * most + 1;
  auto value = [&] { return values[(random.next() >> 33) % static_cast<uint64_t>(span)]; };
  if (t.type.dtype == DType::kF32) {
    for (int64_t i = 0; i < n; ++i) {
      const auto x = static_cast<float>(value());
      std::memcpy(t.at(i), &x, sizeof x);
    }
    return;
  }
  if (ir::size_bytes(t.type.dtype) == 2) {
    char stored[257][2];
    for (int64_t i = 0; i < span; ++i) ir::store_element(t.type.dtype, stored[i], values[i]);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(t.at(i), stored[(random.next() >> 33) % static_cast<uint64_t>(span)], 2);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) ir::store_element(t.type.dtype, t.at(i), value());
}

void fill_ints(HostTensor& t, Random& random, int64_t low, int64_t high) {
  for (int64_t i = 0; i < t.size(); ++i) {
    int64_t x = random.between(low, high);
    // No division by zero; a bool is 0 or 1.
    if (low < 0 && x == 0) x = 1;
    ir::store_int(t.type.dtype, t.at(i), x);
  }
}

void fill_any(HostTensor& t, Random& random) {
  if (ir::is_floating(t.type.dtype)) {
    fill_floats(t, random, 128, 64);
  } else if (t.type.dtype == DType::kBool || t.type.dtype == DType::kU8) {
    fill_ints(t, random, t.type.dtype == DType::kBool ? 0 : 1, t.type.dtype == DType::kBool ? 1 : 8);
  } else {
    fill_ints(t, random, -8, 8);
  }
}

/// Places below `size`, each at most once along `axis`: what is written twice would depend on the
/// order of the writes.
void fill_places(HostTensor& t, Random& random, size_t axis, int64_t size) {
  const ops::AxisSplit s = ops::split_at(t.type.dims, axis);
  std::vector<int64_t> places(static_cast<size_t>(std::max<int64_t>(size, 1)));
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t i = 0; i < s.inner; ++i) {
      std::iota(places.begin(), places.end(), int64_t{0});
      for (int64_t k = 0; k < s.size; ++k) {
        const int64_t left = std::max<int64_t>(size - k, 1);
        const auto pick = static_cast<size_t>(random.between(0, left - 1));
        ir::store_int(t.type.dtype, t.at((o * s.size + k) * s.inner + i), places[pick]);
        if (left > 1) places[pick] = places[static_cast<size_t>(left - 1)];
      }
    }
  }
}

/// Mostly open; some keys out of sight, some weighed.
void fill_mask(HostTensor& t, Random& random) {
  constexpr double kClosed = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < t.size(); ++i) {
    const int64_t draw = random.between(0, 7);
    if (t.type.dtype == DType::kBool) {
      ir::store_int(t.type.dtype, t.at(i), draw > 1);
    } else {
      ir::store_element(t.type.dtype, t.at(i), draw > 4 ? 0.0 : draw == 0 ? kClosed : 0.25 * static_cast<double>(draw));
    }
  }
}

/// Of every 32 elements along K one is the largest, so that rounding to 8 bits changes none.
void fill_activations(HostTensor& t, Random& random) {
  fill_floats(t, random, 127, 128);
  const int64_t k = t.type.dims.back().value();
  for (int64_t i = 0; k != 0 && i < t.size(); ++i) {
    if (i % k % 32 == 0) ir::store_element(t.type.dtype, t.at(i), (random.next() >> 40) % 2 != 0 ? 127 / 128.0 : -127 / 128.0);
  }
}

/// Half, one or two of either sign, less what is added to a norm's weight: products with it are exact.
void fill_norm_weight(const Shape& s, HostTensor& t, Random& random) {
  const auto offset = attr_or<double>(s, "weight_offset", 0);
  for (int64_t i = 0; i < t.size(); ++i) {
    const double x = 0.5 * static_cast<double>(int64_t{1} << random.between(0, 2));
    ir::store_element(t.type.dtype, t.at(i), (random.next() >> 40) % 2 != 0 ? x - offset : -x - offset);
  }
}

/// Ends of groups of rows: some groups are empty, and some rows are behind the last.
void fill_ends(HostTensor& t, Random& random, int64_t rows) {
  std::vector<int64_t> ends(static_cast<size_t>(t.size()));
  for (int64_t& end : ends) end = random.between(0, rows);
  std::sort(ends.begin(), ends.end());
  if (ends.size() > 2) ends[1] = ends[0];
  for (size_t i = 0; i < ends.size(); ++i) {
    ir::store_int(t.type.dtype, t.at(static_cast<int64_t>(i)), ends[i]);
  }
}

void fill(const Shape& s, size_t input, HostTensor& t, Random& random) {
  const auto dim = [&](size_t operand, size_t axis) { return s.inputs[operand].layout.dims[axis]; };
  const auto axis = static_cast<size_t>(
      attr_or<int64_t>(s, "axis", static_cast<int64_t>(s.inputs[0].layout.dims.size()) - 1));
  if (s.op == "gemm" || s.op == "conv" || s.op == "recurrent") return fill_floats(t, random, 8, 8);
  if (s.op == "check") return fill_ints(t, random, 1, 1);
  if (s.op == "grouped_gemm") return input == 2 ? fill_ends(t, random, dim(0, 0)) : fill_floats(t, random, 8, 8);
  if ((s.op == "gemm_ewise" && input < 2) || s.op == "slopes") return fill_floats(t, random, 8, 8);
  if (s.op == "small_steps" && !ir::is_floating(t.type.dtype)) return fill_ints(t, random, 0, 1);
  if (s.op == "quant_linear" && input == 0) return fill_activations(t, random);
  if (s.op == "linears" || s.op == "quant_linears") {
    return input == LinearsPlaces::kNorm ? fill_norm_weight(s, t, random) : fill_floats(t, random, 8, 8);
  }
  const bool attends = s.op == "sdpa" || s.op == "sdpa_backward";
  if ((attends && input == 3) || (s.op == "append_sdpa" && input == 6)) return fill_mask(t, random);
  // The last key, the place of the new one: most of the others are seen.
  if ((attends && input == 4) || (s.op == "append_sdpa" && input == 5)) {
    const int64_t keys = attends ? dim(1, 2) : s.outputs[1].layout.dims[2];
    return fill_ints(t, random, keys * 3 / 4, std::max<int64_t>(keys - 1, 0));
  }
  // Log-sum-exps above most scores: shares of keys stay below one, as those of real ones.
  if (s.op == "sdpa_backward" && input == 6) {
    for (int64_t i = 0; i < t.size(); ++i) {
      ir::store_element(t.type.dtype, t.at(i), 3 + 0.125 * static_cast<double>(random.between(0, 15)));
    }
    return;
  }
  if (s.op == "cross_entropy_backward" && input == 2) {  // above most logits, as real ones
    for (int64_t i = 0; i < t.size(); ++i) ir::store_element(t.type.dtype, t.at(i), 3);
    return;
  }
  if ((s.op == "cross_entropy" || s.op == "cross_entropy_backward") && input == 1) {
    return fill_ints(t, random, 0, std::max<int64_t>(dim(0, 1) - 1, 0));
  }
  if (s.op == "embedding" && input == 1) return fill_ints(t, random, 0, dim(0, 0) - 1);
  if (s.op == "gather" && input == 1) return fill_ints(t, random, 0, dim(0, axis) - 1);
  if (s.op == "scatter" && input == 1) return fill_places(t, random, axis, dim(0, axis));
  if (s.op == "index_copy" && input == 0) {
    const auto at = static_cast<size_t>(
        attr_or<int64_t>(s, "axis", static_cast<int64_t>(s.outputs[0].layout.dims.size()) - 1));
    return fill_places(t, random, 0, s.outputs[0].layout.dims[at]);
  }
  if (s.op == "index" && input > 0) {
    const auto& axes = std::get<ir::Ints>(s.attrs.at("axes"));
    const int64_t size = dim(0, static_cast<size_t>(axes[input - 1]));
    for (int64_t i = 0; i < t.size(); ++i) {
      ir::store_int(t.type.dtype, t.at(i), random.between(-size, size - 1));
    }
    return;
  }
  const bool many = s.op == "adams";
  if ((s.op == "adam" && input == 4) || (many && input == 0)) {
    constexpr double kNumbers[] = {0.125, 0.75, 0.125, 0.875, 0.125, 0.25, 0.5, 0.5};
    for (int64_t i = 0; i < t.size(); ++i) ir::store_element(t.type.dtype, t.at(i), kNumbers[i % 8]);
    return;
  }
  const bool squares = many ? input > 1 && input % 4 == 1 : s.op == "adam" && (input == 3 || input == 5);
  if (squares) {
    for (int64_t i = 0; i < t.size(); ++i) {
      ir::store_element(t.type.dtype, t.at(i), static_cast<double>(random.between(0, 64)) / 32);
    }
    return;
  }
  const bool is_product = s.op == "reduce" && attr_or<std::string>(s, "kind", "") == "prod";
  if (is_product && ir::is_floating(t.type.dtype)) {
    for (int64_t i = 0; i < t.size(); ++i) {
      const double x = random.between(0, 5) == 0 ? 2 : random.between(0, 4) == 0 ? 0.5 : 1;
      ir::store_element(t.type.dtype, t.at(i), (random.next() >> 40) % 2 != 0 ? x : -x);
    }
    return;
  }
  fill_any(t, random);
}

/// A weight, its scales and its zero points as quantize makes them of random numbers. at: the weight's
/// operand, which the others follow.
std::vector<HostTensor> quantised_weight(const Shape& s, size_t at, bool zeros, Random& random) {
  ir::Node node;
  node.op = "quantize";
  for (const char* name : {"bits", "group", "tile", "pairs"}) {
    if (auto it = s.attrs.find(name); it != s.attrs.end()) node.attrs[name] = it->second;
  }
  node.attrs["symmetric"] = int64_t{zeros ? 0 : 1};
  HostTensor w = ops::zeros({DType::kF32, {s.inputs[at].layout.dims[0], s.inputs[0].layout.dims.back()}});
  fill_floats(w, random, 128, 64);
  std::vector<ir::TensorType> types{type_of(s.inputs[at].layout), type_of(s.inputs[at + 1].layout)};
  if (zeros) types.push_back(type_of(s.inputs[at + 2].layout));
  return ops::get("quantize").reference(node, {&w}, types);
}

/// Operands that are parts of quantised weights, by their places.
std::map<size_t, HostTensor> quantised_weights(const Shape& s, Random& random) {
  std::map<size_t, HostTensor> out;
  const auto add = [&](size_t at, bool zeros) {
    for (HostTensor& part : quantised_weight(s, at, zeros, random)) out.emplace(at++, std::move(part));
  };
  if (s.op == "quant_linear") add(1, s.inputs.size() > 3 && s.inputs[3].present);
  const LinearsPlaces places(s.op);
  for (size_t i = 0; s.op == "quant_linears" && places.weight(i) < s.inputs.size(); ++i) {
    add(places.weight(i), false);
  }
  return out;
}

Filled blank(const Layout& layout) {
  Filled out;
  out.memory = std::make_unique<GuardedMemory>(extent_bytes(layout));
  out.values = ops::zeros(type_of(layout));
  out.offsets = ops::strided_offsets(layout.dims, layout.strides);
  return out;
}

void write(Filled& f) {
  const size_t item = ir::size_bytes(f.values.type.dtype);
  auto* base = reinterpret_cast<char*>(f.memory->data());
  if (item == 4) {
    for (size_t i = 0; i < f.offsets.size(); ++i) {
      std::memcpy(base + f.offsets[i] * 4, f.values.at(static_cast<int64_t>(i)), 4);
    }
  } else if (item == 2) {
    const char* from = f.values.bytes.data();
    for (size_t i = 0; i < f.offsets.size(); ++i) std::memcpy(base + f.offsets[i] * 2, from + 2 * i, 2);
  } else {
    for (size_t i = 0; i < f.offsets.size(); ++i) {
      std::memcpy(base + static_cast<size_t>(f.offsets[i]) * item, f.values.at(static_cast<int64_t>(i)), item);
    }
  }
  read_back(f);  // broadcast elements were written several times: the last one counts
}

}  // namespace

GuardedMemory::GuardedMemory(size_t bytes)
    : bytes_(bytes),
      block_(static_cast<std::byte*>(std::aligned_alloc(kGuard, block_bytes())),
             std::free) {
  if (block_ == nullptr) throw std::bad_alloc();
  std::memset(block_.get(), 0xff, block_bytes());
}

bool GuardedMemory::guards_intact() const {
  const auto intact = [](const std::byte* p) {
    return std::all_of(p, p + kGuard, [](std::byte b) { return b == std::byte{0xff}; });
  };
  return intact(block_.get()) && intact(data() + bytes_);
}

size_t extent_bytes(const Layout& layout) {
  if (layout.is_empty()) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < layout.dims.size(); ++d) last += (layout.dims[d] - 1) * layout.strides[d];
  return static_cast<size_t>(last + 1) * ir::size_bytes(layout.dtype);
}

std::vector<Filled> random_inputs(const Shape& shape, uint64_t seed) {
  Random random(seed);
  std::map<size_t, HostTensor> weights = quantised_weights(shape, random);
  std::vector<Filled> out;
  for (size_t i = 0; i < shape.inputs.size(); ++i) {
    if (!shape.inputs[i].present) {
      out.emplace_back();
      continue;
    }
    Filled f = blank(shape.inputs[i].layout);
    if (const auto weight = weights.find(i); weight != weights.end()) {
      f.values = std::move(weight->second);
    } else {
      fill(shape, i, f.values, random);
    }
    write(f);
    out.push_back(std::move(f));
  }
  return out;
}

std::vector<Filled> blank_outputs(const Shape& shape, uint64_t seed) {
  std::vector<Filled> out;
  Random random(seed + 1);
  for (const select::Operand& o : shape.outputs) {
    if (!o.present) {
      out.emplace_back();
      continue;
    }
    Filled f = blank(o.layout);
    if (shape.op == "index_copy" || (shape.op == "append_sdpa" && !out.empty())) {
      fill_any(f.values, random);
      write(f);
    }
    out.push_back(std::move(f));
  }
  return out;
}

void read_back(Filled& f) {
  const size_t item = ir::size_bytes(f.values.type.dtype);
  const auto* base = reinterpret_cast<const char*>(f.memory->data());
  if (item == 2) {
    char* to = f.values.bytes.data();
    for (size_t i = 0; i < f.offsets.size(); ++i) std::memcpy(to + 2 * i, base + f.offsets[i] * 2, 2);
    return;
  }
  for (size_t i = 0; i < f.offsets.size(); ++i) {
    std::memcpy(f.values.at(static_cast<int64_t>(i)), base + static_cast<size_t>(f.offsets[i]) * item, item);
  }
}

bool gaps_intact(const Filled& f) {
  const size_t item = ir::size_bytes(f.values.type.dtype);
  if (f.offsets.size() * item >= f.memory->size()) return true;
  std::vector<char> covered(f.memory->size() / item, 0);
  for (int64_t at : f.offsets) covered[static_cast<size_t>(at)] = 1;
  for (size_t i = 0; i < covered.size(); ++i) {
    if (covered[i] != 0) continue;
    const std::byte* p = f.memory->data() + i * item;
    if (!std::all_of(p, p + item, [](std::byte b) { return b == std::byte{0xff}; })) return false;
  }
  return true;
}

}  // namespace rm::selfcheck
