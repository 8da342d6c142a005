// u64 in the operators of programs, which order and divide i64: the same bits, put in order.
#pragma once

#include "onnx/importer.hpp"

namespace rm::onnx {

/// True when the value is u64; binary operators of ONNX have operands of one type.
bool is_u64(const Importer& m, ValueId v);
/// lt, le, gt or ge of two u64.
ValueId compared_u64(Importer& m, const std::string& op, ValueId a, ValueId b);
/// minimum or maximum of two u64.
ValueId extreme_u64(Importer& m, const std::string& op, ValueId a, ValueId b);
ValueId quotient_u64(Importer& m, ValueId a, ValueId b);
ValueId remainder_u64(Importer& m, ValueId a, ValueId b);
/// a shifted by `by` places, 0 from 64 places on; both u64.
ValueId shifted_u64(Importer& m, ValueId a, ValueId by, bool left);

}  // namespace rm::onnx
