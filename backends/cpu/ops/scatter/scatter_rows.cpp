// Rows of scatter: y = x with src written (or added, ...) at index along an axis.  All indices are
// checked before anything of src is written; one thread writes, in index order, so equal indices
// give the same result every time.
#include "ops/scatter/rows.hpp"

#include "common/lines.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"
#include "common/strided_copy.hpp"

namespace rm::cpu {
namespace {

template <class T>
T sum_of(T a, T b) {
  T out;
  if constexpr (kIsFloat<T>) {
    put(get(a) + get(b), &out);
  } else if constexpr (std::is_same_v<T, boolean>) {
    out.value = a.value | b.value;
  } else {
    out = static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
  return out;
}

enum class Kind { kSet, kAdd, kMul, kMax, kMin };

Kind kind_of(std::string_view name) {
  if (name == "set") return Kind::kSet;
  if (name == "add") return Kind::kAdd;
  if (name == "mul") return Kind::kMul;
  if (name == "max") return Kind::kMax;
  if (name == "min") return Kind::kMin;
  throw std::invalid_argument("[scatter] expected kind set, add, mul, max or min, got " +
                              std::string(name));
}

template <class T>
T product_of(T a, T b) {
  T out;
  if constexpr (kIsFloat<T>) {
    put(get(a) * get(b), &out);
  } else if constexpr (std::is_same_v<T, boolean>) {
    out.value = a.value & b.value;
  } else {
    out = static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
  return out;
}

// The larger (or smaller) of both; NaN wins.
template <class T>
T extreme_of(T a, T b, bool largest) {
  const auto old = get(a), src = get(b);
  if (old != old) return a;
  if (src != src) return b;
  return largest == (src > old) ? b : a;
}

template <class T>
T combined(Kind kind, T a, T b) {
  switch (kind) {
    case Kind::kSet:
      return b;
    case Kind::kAdd:
      return sum_of(a, b);
    case Kind::kMul:
      return product_of(a, b);
    case Kind::kMax:
    case Kind::kMin:
      break;
  }
  return extreme_of(a, b, kind == Kind::kMax);
}

class Scatter {
 public:
  static constexpr const char* kOp = "scatter";
  static constexpr const char* kAlgorithm = "elements";

  static const char* reject(const Problem& p) {
    const DType t = p.input(1).dtype;
    if (t != DType::i64 && t != DType::i32) return "the index is neither i32 nor i64";
    return p.input(0).dtype == p.input(2).dtype ? nullptr : "x and src have different types";
  }
  static double cost_ns(const Problem& p) {
    return 200 + 2.0 * static_cast<double>(p.output(0).numel());
  }

  Scatter(const Problem& p, Isa) : copy_(p.input(0), p.output(0)) {
    View index = p.input(1), src = p.input(2), y = p.output(0);
    at_least_one_axis(index);
    at_least_one_axis(src);
    at_least_one_axis(y);
    const int axis = normal_axis(p.attr_int("axis", 0), y.rank());
    kind_ = kind_of(p.attr_string("kind", "set"));
    if (index.shape != src.shape) {
      throw std::invalid_argument("[scatter] expected an index of src's shape");
    }
    type_ = y.dtype;
    limit_ = y.dim(axis);
    step_ = y.step(axis);
    wide_ = index.dtype == DType::i64;
    y.stride[static_cast<size_t>(axis)] = 0;  // the index takes that axis' place
    n_ = src.dim(-1);
    strides_[0] = y.step(-1);
    strides_[1] = index.step(-1);
    strides_[2] = src.step(-1);
    rows_ = RowsIndex(src.shape, {y.stride, index.stride, src.stride});
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    for (int64_t r = 0; r < rows_.count(); ++r) {
      for (int64_t i = 0, from = rows_.offset(1, r); i < n_; ++i) {
        const int64_t where = read_index(l.inputs[1], from + i * strides_[1], wide_);
        if (where < 0 || where >= limit_) {
          return plugin::fail(RM_OUT_OF_RANGE, "[scatter] expected indices in [0, " +
                                                   std::to_string(limit_) + "), got " +
                                                   std::to_string(where));
        }
      }
    }
    copy_.run(l.outputs[0], l.inputs[0]);
    visit(type_, [&](auto zero) { write<decltype(zero)>(l); });
    return nullptr;
  }

 private:
  template <class T>
  void write(const rm_launch& l) const {
    for (int64_t r = 0; r < rows_.count(); ++r) {
      auto* y = static_cast<T*>(l.outputs[0]) + rows_.offset(0, r);
      const auto* src = static_cast<const T*>(l.inputs[2]) + rows_.offset(2, r);
      const int64_t from = rows_.offset(1, r);
      for (int64_t i = 0; i < n_; ++i) {
        const int64_t where = read_index(l.inputs[1], from + i * strides_[1], wide_);
        T& to = y[where * step_ + i * strides_[0]];
        to = combined(kind_, to, src[i * strides_[2]]);
      }
    }
  }

  StridedCopy copy_;
  RowsIndex rows_;
  DType type_;
  int64_t limit_, step_, n_, strides_[3];
  Kind kind_;
  bool wide_;
};

}  // namespace

std::span<const rm_kernel> scatter_rows() { return plain_rows<Scatter>(); }

}  // namespace rm::cpu
