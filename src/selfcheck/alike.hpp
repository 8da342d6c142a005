// The small problem on which a row is checked in place of a large one.
//
// Two sizes are alike where they lie at the same place between the edges a row names (rm_edge): the
// same rest behind whole tiles, blocks and pieces, and none, one, or several of those. So a check
// costs the same for a vocabulary of fifty thousand columns as for one of some hundred, and a
// verdict holds for all problems that are alike.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "select/problem.hpp"

namespace rm::selfcheck {

/// A problem as one can change it.
struct Shape {
  std::string op;
  std::vector<select::Operand> inputs, outputs;
  ir::Attrs attrs;
};

/// An attribute of the operator; `otherwise` where it is left out or of another type.
template <class T>
T attr_or(const Shape& shape, const std::string& name, T otherwise) {
  const auto it = shape.attrs.find(name);
  const T* value = it == shape.attrs.end() ? nullptr : std::get_if<T>(&it->second);
  return value == nullptr ? otherwise : *value;
}

/// `size` reduced to the smallest one alike: at most two whole steps of every edge, and the rest.
int64_t alike_size(int64_t size, std::vector<int64_t> edges);

/// The view with other sizes: the order of its axes in memory, repeated axes and the gaps between rows
/// stay.
ir::Layout laid_out(const ir::Layout& from, const ir::Ints& dims);
/// Of conv, pool, resize and group_norm (alike_images.cpp), for a row of those edges; false for another
/// operator.
bool reduce_images(Shape& shape, const rm_kernel& row);
/// Of recurrent (alike_recurrent.cpp); false for another operator.
bool reduce_recurrent(Shape& shape);
/// The problem itself.
Shape shape_of(const select::Problem& problem);
/// The problem on which `row` is checked for `problem`; small ones are their own.
Shape alike(const select::Problem& problem, const rm_kernel& row);

}  // namespace rm::selfcheck
