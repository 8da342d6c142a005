// Operators whose result has a size that values decide. The values are constants of the file or of
// an input that each call names (decision 0059); what a program computes is refused (RM342).
#include <cmath>
#include <map>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

void convert_compress(Importer& m) {
  ValueId x = m.in(0);
  const std::vector<double> chosen = m.reals(1, "a condition");
  int64_t axis = 0;
  if (m.attribute("axis") == nullptr) {
    x = m.reshape(x, {ir::product(m.dims(x))});
  } else {
    axis = m.axis(m.i("axis", 0), m.rank(x));
  }
  const int64_t size = m.fixed(m.dims(x)[static_cast<size_t>(axis)]);
  if (static_cast<int64_t>(chosen.size()) > size) {
    m.refuse("at most " + std::to_string(size) + " conditions", std::to_string(chosen.size()));
  }
  Ints numbers;
  for (size_t k = 0; k < chosen.size(); ++k) {
    if (chosen[k] != 0) numbers.push_back(static_cast<int64_t>(k));
  }
  m.out(m.take(x, axis, m.integers(numbers)));
}

// The coordinates of the elements that are not 0, an axis a row.
void convert_nonzero(Importer& m) {
  const std::vector<double> values = m.reals(0, "values");
  const Dims d = m.dims(m.in(0));
  Ints found;
  for (size_t k = 0; k < values.size(); ++k) {
    if (values[k] != 0) found.push_back(static_cast<int64_t>(k));
  }
  Ints coordinates(found.size() * d.size());
  for (size_t k = 0; k < found.size(); ++k) {
    int64_t rest = found[k];
    for (size_t axis = d.size(); axis-- > 0;) {
      coordinates[axis * found.size() + k] = rest % d[axis].value();
      rest /= d[axis].value();
    }
  }
  m.out(m.reshape(m.integers(coordinates),
                  {Dim(static_cast<int64_t>(d.size())), Dim(static_cast<int64_t>(found.size()))}));
}

// The different slices along an axis (of the flattened tensor without one): the first of each, in
// order or as they come; for each slice the number of its like; how many there are.
void convert_unique(Importer& m) {
  const std::vector<double> values = m.reals(0, "values");
  ValueId x = m.in(0);
  for (double v : values) {  // as doubles, which order everything but NaN and large integers
    const bool is_exact = ir::is_floating(m.dtype(x)) || std::fabs(v) < 0x1p53;
    if (std::isnan(v) || !is_exact) m.refuse("values that doubles hold, not NaN", "others");
  }
  size_t axis = 0;
  if (m.attribute("axis") == nullptr) {
    x = m.reshape(x, {ir::product(m.dims(x))});
  } else {
    axis = static_cast<size_t>(m.axis(m.i("axis", 0), m.rank(x)));
  }
  const Dims d = m.dims(x);
  const int64_t size = d[axis].value();
  const int64_t inner =
      ir::product(Dims(d.begin() + static_cast<std::ptrdiff_t>(axis) + 1, d.end())).value();
  std::vector<std::vector<double>> slices(static_cast<size_t>(size));
  for (size_t k = 0; k < values.size(); ++k) {
    slices[static_cast<size_t>(static_cast<int64_t>(k) / inner % size)].push_back(values[k]);
  }
  std::map<std::vector<double>, int64_t> numbers;
  Ints firsts, inverse, counts;
  for (int64_t k = 0; k < size; ++k) {
    const auto [it, is_new] =
        numbers.emplace(slices[static_cast<size_t>(k)], static_cast<int64_t>(firsts.size()));
    if (is_new) firsts.push_back(k), counts.push_back(0);
    ++counts[static_cast<size_t>(it->second)];
    inverse.push_back(it->second);
  }
  if (m.i("sorted", 1) != 0) {
    Ints old, now(firsts.size()), ordered_firsts, ordered_counts;
    for (const auto& [slice, number] : numbers) {
      now[static_cast<size_t>(number)] = static_cast<int64_t>(old.size());
      old.push_back(number);
      ordered_firsts.push_back(firsts[static_cast<size_t>(number)]);
      ordered_counts.push_back(counts[static_cast<size_t>(number)]);
    }
    firsts = ordered_firsts, counts = ordered_counts;
    for (int64_t& n : inverse) n = now[static_cast<size_t>(n)];
  }
  m.out(m.take(x, static_cast<int64_t>(axis), m.integers(firsts)));
  m.out(m.integers(firsts), 1);
  m.out(m.integers(inverse), 2);
  m.out(m.integers(counts), 3);
}

}  // namespace

void add_selection(Table* table) {
  Table& t = *table;
  t["Compress"] = convert_compress;
  t["NonZero"] = convert_nonzero;
  t["Unique"] = convert_unique;
}

}  // namespace rm::onnx
