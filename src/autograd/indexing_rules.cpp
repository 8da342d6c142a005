// Look-ups scatter their gradients back; elements that were read twice get both.
#include "autograd/rules.hpp"
#include "base/error.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

ValueId scatter_add(Builder& b, ValueId into, ValueId index, ValueId src, int64_t axis) {
  return b.op("scatter", {into, index, src}, {{"axis", axis}, {"kind", std::string("add")}});
}

// `padding_idx` marks a row of the table that is never trained.
void embedding(Adjoint& a) {
  Builder& b = a.b;
  const Dims table = b.dims(a.x(0));
  int64_t count = 1;
  for (const Dim& d : b.dims(a.x(1))) count *= d.value();
  ValueId rows = b.reshape(a.dy(), {Dim(count), table[1]});
  ValueId ids = b.reshape(a.x(1), {Dim(count), Dim(1)});
  if (const int64_t padding = a.node.i_or("padding_idx", -1); padding >= 0) {
    ValueId real = b.op("ne", {ids, b.number(ids, static_cast<double>(padding))});
    rows = b.keep_where(real, rows);
  }
  a.din[0] = scatter_add(b, b.zeros_like(a.x(0)), b.expand(ids, b.dims(rows)), rows, 0);
}

// One element a row, as losses over classes pick it: an element-wise form, which becomes a part of what
// reads it, instead of zeros that are written, scattered into and read again.
ValueId one_of_row(Adjoint& a, size_t axis) {
  Builder& b = a.b;
  Dims along(b.rank(a.x(0)), Dim(1));
  along[axis] = b.dims(a.x(0))[axis];
  ValueId number = b.reshape(b.iota(along[axis].value(), b.dtype(a.x(1))), along);
  return b.keep_where(b.op("eq", {number, a.x(1)}), a.dy());
}

void gather(Adjoint& a) {
  const auto axis = static_cast<size_t>(a.node.i("axis"));
  Dims one = a.b.dims(a.x(0));
  one[axis] = Dim(1);
  if (a.b.dims(a.x(1)) == one) {
    a.din[0] = one_of_row(a, axis);
    return;
  }
  a.din[0] = scatter_add(a.b, a.b.zeros_like(a.x(0)), a.x(1), a.dy(), a.node.i("axis"));
}

// The indexed axes as one, of which a flat index chooses.
void index(Adjoint& a) {
  Builder& b = a.b;
  const Ints& axes = a.node.ints("axes");
  const Dims full = b.dims(a.x(0));
  const auto first = static_cast<size_t>(axes.front()), count = axes.size();
  ValueId flat = ir::kNoValue;
  int64_t total = 1;
  for (size_t k = 0; k < count; ++k) {
    const int64_t size = full[first + k].value();
    ValueId id = b.cast(a.x(k + 1), ir::DType::kI64);
    ValueId negative = b.op("lt", {id, b.number(id, 0)});
    id = b.where(negative, b.plus(id, static_cast<double>(size)), id);
    flat = flat == ir::kNoValue ? id : b.add(b.scaled(flat, static_cast<double>(size)), id);
    total *= size;
  }
  const Dims points = b.dims(flat);
  int64_t number = 1;
  for (const Dim& d : points) number *= d.value();
  const auto at = static_cast<std::ptrdiff_t>(first);
  Dims merged(full.begin(), full.begin() + at);  // of x
  merged.emplace_back(total);
  merged.insert(merged.end(), full.begin() + at + static_cast<std::ptrdiff_t>(count), full.end());
  Dims taken = merged;  // of the result
  taken[first] = Dim(number);
  Dims column(merged.size(), Dim(1));
  column[first] = Dim(number);
  ValueId ids = b.expand(b.reshape(flat, column), taken);
  ValueId zeros = b.full({b.dtype(a.x(0)), merged}, 0);
  ValueId sum = scatter_add(b, zeros, ids, b.reshape(a.dy(), taken), axes.front());
  a.din[0] = b.reshape(sum, full);
}

void scatter(Adjoint& a) {
  Builder& b = a.b;
  const int64_t axis = a.node.i("axis");
  const std::string kind = a.node.s("kind");
  if (kind != "set" && kind != "add") {
    throw Error(RM_UNIMPLEMENTED,
                "[autograd] expected a scatter that sets or adds, got '" + kind + "'", "RM702");
  }
  const bool adds = kind == "add";
  if (a.wants(0)) {
    a.din[0] = adds ? a.dy()
                    : b.op("scatter", {a.dy(), a.x(1), b.zeros_like(a.x(2))}, a.node.attrs);
  }
  if (a.wants(2)) a.din[2] = b.op("gather", {a.dy(), a.x(1)}, {{"axis", axis}});
}

void index_copy(Adjoint& a) {
  Builder& b = a.b;
  const int64_t axis = a.node.i("axis");
  if (a.wants(0)) {
    a.din[0] = b.op("index_copy", {a.dy(), a.x(1), b.zeros_like(a.x(2))}, {{"axis", axis}});
  }
  if (a.wants(2)) a.din[2] = b.op("index", {a.dy(), a.x(1)}, {{"axes", Ints{axis}}});
}

void sort(Adjoint& a) {
  if (a.dy() == ir::kNoValue) return;
  a.din[0] = scatter_add(a.b, a.b.zeros_like(a.x(0)), a.node.results[1], a.dy(), a.node.i("axis"));
}

}  // namespace

std::vector<NamedRule> indexing_rules() {
  return {{"embedding", embedding}, {"gather", gather},         {"index", index},
          {"scatter", scatter},     {"index_copy", index_copy}, {"sort", sort}};
}

}  // namespace rm::autograd
