// See alias_shim.hpp.
#include "_shim/alias_shim.hpp"

#include <algorithm>
#include <vector>

namespace rm::cuda_ops {
namespace {

struct Axis {
  std::int64_t stride, count;  // bytes, positive; elements, more than one
};

/// A tensor as bytes: the lowest address and the axes that leave it, the shortest steps first.
struct Bytes {
  std::uintptr_t low = 0;
  int axes = 0;
  bool repeats = false;  // an axis of stride 0
  std::int64_t element = 1;
  Axis axis[kMaxRank] = {};
};

Bytes bytes_of(const Tensor& t) {
  Bytes b;
  b.element = size_of(t.dtype);
  b.low = reinterpret_cast<std::uintptr_t>(t.data);
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] <= 1) continue;
    const std::int64_t step = t.stride[d] * b.element, reach = step * (t.shape[d] - 1);
    if (step == 0) b.repeats = true;
    if (step < 0) b.low += static_cast<std::uintptr_t>(reach);
    if (step != 0) b.axis[b.axes++] = {step < 0 ? -step : step, t.shape[d]};
  }
  std::sort(b.axis, b.axis + b.axes,
            [](const Axis& x, const Axis& y) { return x.stride < y.stride; });
  return b;
}

/// Bytes that the axes whose steps are no multiple of `period` span from any start.
std::int64_t arc_of(const Bytes& b, std::int64_t period) {
  std::int64_t arc = b.element;
  for (int i = 0; i < b.axes; ++i) {
    if (b.axis[i].stride % period != 0) arc += b.axis[i].stride * (b.axis[i].count - 1);
  }
  return arc;
}

/// Modulo `period` each tensor is an arc; arcs that do not meet prove that the tensors do not.
bool apart_modulo(const Bytes& a, const Bytes& b, std::int64_t period) {
  const auto turn = static_cast<std::uintptr_t>(period);
  const auto ahead = static_cast<std::int64_t>((b.low % turn + turn - a.low % turn) % turn);
  return ahead >= arc_of(a, period) && period - ahead >= arc_of(b, period);
}

/// Addresses from the lowest byte to behind the highest one: what settles most pairs.
struct Range {
  std::uintptr_t begin, end;
};

Range range_of(const Tensor& t) {
  const auto element = size_of(t.dtype);
  auto low = reinterpret_cast<std::uintptr_t>(t.data), high = low + element;
  for (int d = 0; d < t.rank; ++d) {
    const std::int64_t reach = (t.shape[d] - 1) * t.stride[d] * element;
    (reach < 0 ? low : high) += static_cast<std::uintptr_t>(reach);
  }
  return {low, high};
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || size_of(a.dtype) != size_of(b.dtype) || !same_shape(a, b)) return false;
  for (int d = 0; d < a.rank; ++d) {
    if (a.shape[d] > 1 && a.stride[d] != b.stride[d]) return false;
  }
  return true;
}

bool present(const Operand& o) { return o.tensor != nullptr && numel(*o.tensor) > 0; }

Status shared(const char* op, const char* result, const char* other) {
  return invalid(text_of({"[", op, "] expected ", result, " and ", other,
                          " in memory apart from each other, got views that share bytes; try a "
                          "buffer of its own for ",
                          result}));
}

}  // namespace

bool lies_apart_from_itself(const Tensor& t) {
  if (numel(t) == 0 || is_contiguous(t)) return true;
  const Bytes b = bytes_of(t);
  if (b.repeats) return false;
  std::int64_t covered = b.element;
  for (int i = 0; i < b.axes; ++i) {
    if (b.axis[i].stride < covered) return false;
    covered += b.axis[i].stride * (b.axis[i].count - 1);
  }
  return true;
}

bool lie_apart(const Tensor& a, const Tensor& b) {
  if (numel(a) == 0 || numel(b) == 0) return true;
  const Range mine = range_of(a), other = range_of(b);
  if (mine.end <= other.begin || other.end <= mine.begin) return true;
  const Bytes x = bytes_of(a), y = bytes_of(b);
  for (const Bytes* t : {&x, &y}) {
    for (int i = 0; i < t->axes; ++i) {
      if (apart_modulo(x, y, t->axis[i].stride)) return true;
    }
  }
  return false;
}

Status check_memory(const char* op, std::span<const Operand> results,
                    std::span<const Operand> operands, const Workspace& workspace) {
  Tensor space;
  space.data = workspace.data, space.dtype = DType::u8, space.rank = 1, space.stride[0] = 1;
  space.shape[0] = workspace.data ? static_cast<std::int64_t>(workspace.bytes) : 0;
  for (const Operand& r : results) {
    if (!present(r)) continue;
    if (!lies_apart_from_itself(*r.tensor)) {
      return invalid(text_of({"[", op, "] expected ", r.name,
                              " with elements of its own, got strides by which several share "
                              "memory; try a tensor that was not expanded"}));
    }
    if (!lie_apart(*r.tensor, space)) return shared(op, r.name, "the workspace");
    for (const Operand& other : results) {
      if (&other < &r && present(other) && !lie_apart(*r.tensor, *other.tensor)) {
        return shared(op, r.name, other.name);
      }
    }
    for (const Operand& o : operands) {
      if (!present(o) || lie_apart(*r.tensor, *o.tensor)) continue;
      if (r.in_place && o.in_place && same_view(*r.tensor, *o.tensor)) continue;
      return shared(op, r.name, o.name);
    }
  }
  for (const Operand& o : operands) {
    if (present(o) && !lie_apart(*o.tensor, space)) return shared(op, "the workspace", o.name);
  }
  return {};
}

Status check_many_dense(const char* op, std::span<const Operand> results,
                        std::span<const Operand> operands) {
  struct Named : Range {
    const char* name;
    bool written;
  };
  std::vector<Named> all;
  all.reserve(results.size() + operands.size());
  for (const auto& [list, written] : {std::pair(results, true), std::pair(operands, false)}) {
    for (const Operand& o : list) {
      if (!present(o)) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(o.tensor->data);
      const auto bytes = static_cast<std::uintptr_t>(numel(*o.tensor) * size_of(o.tensor->dtype));
      all.push_back({{begin, begin + bytes}, o.name, written});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Named& x, const Named& y) { return x.begin < y.begin; });
  const Named *any = nullptr, *result = nullptr;  // those that reach furthest so far
  for (const Named& r : all) {
    const Named* met = r.written ? any : result;
    if (met && met->end > r.begin) {
      return r.written ? shared(op, r.name, met->name) : shared(op, met->name, r.name);
    }
    if (any == nullptr || r.end > any->end) any = &r;
    if (r.written && (result == nullptr || r.end > result->end)) result = &r;
  }
  return {};
}

}  // namespace rm::cuda_ops
