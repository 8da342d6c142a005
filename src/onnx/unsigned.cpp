// Order, division and shifts of u64 by what i64 has.
#include "onnx/unsigned.hpp"

#include <cstdint>

namespace rm::onnx {
namespace {

using ir::DType;

ValueId scalar(Importer& m, int64_t value) { return m.reshape(m.integers({value}), {}); }

// With the top bit turned, bits as i64 are ordered as they are as u64.
ValueId ordered(Importer& m, ValueId bits) { return m.op("xor", {bits, scalar(m, INT64_MIN)}); }

ValueId compared(Importer& m, const std::string& op, ValueId a, ValueId b) {
  return m.op(op, {ordered(m, a), ordered(m, b)});
}

// One place to the right; what comes in from the left is 0.
ValueId halved(Importer& m, ValueId bits) {
  return m.op("and", {m.op("floor_div", {bits, scalar(m, 2)}), scalar(m, INT64_MAX)});
}

// By a divisor of the upper half: 0 or 1. By others: twice the quotient of the half, which both
// are i64, is right or one too small.
ValueId quotient(Importer& m, ValueId a, ValueId b) {
  ValueId twice = m.op("mul", {m.op("floor_div", {halved(m, a), b}), scalar(m, 2)});
  ValueId rest = m.op("sub", {a, m.op("mul", {twice, b})});
  ValueId small = m.op("add", {twice, m.cast(compared(m, "ge", rest, b), DType::kI64)});
  ValueId large = m.cast(compared(m, "ge", a, b), DType::kI64);
  return m.op("where", {m.op("lt", {b, scalar(m, 0)}), large, small});
}

}  // namespace

bool is_u64(const Importer& m, ValueId v) { return m.dtype(v) == DType::kU64; }

ValueId compared_u64(Importer& m, const std::string& op, ValueId a, ValueId b) {
  return compared(m, op, m.cast(a, DType::kI64), m.cast(b, DType::kI64));
}

ValueId extreme_u64(Importer& m, const std::string& op, ValueId a, ValueId b) {
  return m.op("where", {compared_u64(m, op == "minimum" ? "lt" : "gt", a, b), a, b});
}

ValueId quotient_u64(Importer& m, ValueId a, ValueId b) {
  return m.cast(quotient(m, m.cast(a, DType::kI64), m.cast(b, DType::kI64)), DType::kU64);
}

ValueId remainder_u64(Importer& m, ValueId a, ValueId b) {
  ValueId x = m.cast(a, DType::kI64), y = m.cast(b, DType::kI64);
  return m.cast(m.op("sub", {x, m.op("mul", {quotient(m, x, y), y})}), DType::kU64);
}

ValueId shifted_u64(Importer& m, ValueId a, ValueId by, bool left) {
  ValueId x = m.cast(a, DType::kI64), n = m.cast(by, DType::kI64);
  ValueId is_past = m.op("ge", {ordered(m, n), scalar(m, INT64_MIN + 64)});
  ValueId places = m.op("where", {is_past, scalar(m, 0), n}), y = ir::kNoValue;
  if (left) {
    y = m.op("mul", {x, m.op("pow", {scalar(m, 2), places})});  // 2^63 is the sign alone: it wraps
  } else {
    ValueId rest = m.op("maximum", {m.op("sub", {places, scalar(m, 1)}), scalar(m, 0)});
    y = m.op("floor_div", {halved(m, x), m.op("pow", {scalar(m, 2), rest})});
    y = m.op("where", {m.op("eq", {places, scalar(m, 0)}), x, y});
  }
  return m.cast(m.op("where", {is_past, scalar(m, 0), y}), DType::kU64);
}

}  // namespace rm::onnx
