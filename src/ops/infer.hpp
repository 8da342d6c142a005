// What type inference of every operator shares: comparing dims that may be symbolic, broadcasting,
// access to operands with errors in the house form.
#pragma once

#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "ops/op_def.hpp"

namespace rm::ops {

enum class DimOrder { kEqual, kDifferent, kUnknown };

/// kDifferent only when the difference is a non-zero integer.
DimOrder compare(const ir::Dim& a, const ir::Dim& b);

/// Throws rm::Error(RM_INVALID_ARGUMENT) "[op] expected ..., got ...".
[[noreturn]] void fail(const ir::Node& node, const std::string& expected, const std::string& got);

bool present(const ir::Node& node, size_t operand);
/// The operand's type; throws when it is absent.
const ir::TensorType& operand_type(const ir::Graph& graph, const ir::Node& node, size_t operand);
const ir::TensorType& result_type(const ir::Graph& graph, const ir::Node& node, size_t result = 0);

/// The one dim both stand for: the static one if either is. Throws when provably different.
ir::Dim unify(const ir::Node& node, const ir::Dim& a, const ir::Dim& b, const std::string& what);
/// numpy broadcasting; a symbolic dim against another is taken to agree. Throws only when both are
/// static, differ, and neither is 1.
ir::Dims broadcast(const ir::Node& node, const ir::Dims& a, const ir::Dims& b);
/// Throws unless `from` broadcasts to `to` (each dim equal, 1, or not provably different).
void check_broadcasts_to(const ir::Node& node, const ir::Dims& from, const ir::Dims& to);

/// Attribute `axis` checked against `rank`; the last axis when there is none.
size_t axis_of(const ir::Node& node, size_t rank);
void check_rank(const ir::Node& node, const ir::TensorType& type, size_t rank, const char* what);
void check_dtype(const ir::Node& node, const ir::TensorType& type, ir::DType dtype,
                 const char* what);
bool is_integer(ir::DType dtype);  // not bool

std::string dims_text(const ir::Dims& dims);

/// Bytes of all operands and results.
double traffic_bytes(const ir::Graph& graph, const ir::Node& node);
/// Cost of a view: nothing moves.
Cost view_cost(const ir::Graph& graph, const ir::Node& node);
/// One pass over operands and results, no arithmetic.
Cost copy_cost(const ir::Graph& graph, const ir::Node& node);

}  // namespace rm::ops
