// Einsum: pairs of operands become stacked matrix products over their labels.
#include <algorithm>
#include <cctype>

#include "onnx/windows.hpp"

namespace rm::onnx {
namespace {

struct Labelled {
  ValueId value;
  std::string labels;  // one character an axis
};

// The axes of "..." get the labels '0', '1', ... from the end.
std::string spelled(const Importer& m, const std::string& term, size_t rank, bool is_output,
                    size_t* most) {
  std::string letters, out;
  size_t at = std::string::npos;
  for (size_t k = 0; k < term.size(); ++k) {
    if (term.compare(k, 3, "...") == 0) {
      if (at != std::string::npos) m.refuse("one ellipsis", term);
      at = letters.size();
      k += 2;
    } else if (std::isalpha(static_cast<unsigned char>(term[k])) != 0) {
      letters.push_back(term[k]);
    } else {
      m.refuse("letters", term);
    }
  }
  if (at == std::string::npos) {
    if (!is_output && letters.size() != rank) m.refuse(std::to_string(rank) + " labels", term);
    return letters;
  }
  if (!is_output) {
    if (letters.size() > rank || rank - letters.size() > 9)
      m.refuse(std::to_string(rank) + " labels", term);
    *most = std::max(*most, rank - letters.size());
  }
  for (size_t k = is_output ? *most : rank - letters.size(); k-- > 0;)
    out.push_back(static_cast<char>('0' + k));
  return letters.substr(0, at) + out + letters.substr(at);
}

bool holds(const std::string& text, char c) { return text.find(c) != std::string::npos; }

// Axes in the order of `labels`, which are among those of x.
ValueId ordered(Importer& m, const Labelled& x, const std::string& labels) {
  Ints axes;
  for (char c : labels) axes.push_back(static_cast<int64_t>(x.labels.find(c)));
  return m.permute(x.value, axes);
}

// A label that stands twice means the diagonal.
Labelled without_repeats(Importer& m, Labelled x) {
  for (size_t k = 0; k < x.labels.size(); ++k) {
    const size_t again = x.labels.find(x.labels[k], k + 1);
    if (again == std::string::npos) continue;
    Ints axes{static_cast<int64_t>(k), static_cast<int64_t>(again)};
    std::string rest(1, x.labels[k]);
    for (size_t a = 0; a < x.labels.size(); ++a) {
      if (a == k || a == again) continue;
      axes.push_back(static_cast<int64_t>(a));
      rest.push_back(x.labels[a]);
    }
    ValueId turned = m.permute(x.value, axes), number = m.count(m.dims(turned)[0]);
    x = {m.op("index", {turned, number, number}, {{"axes", Ints{0, 1}}}), rest};
    k = static_cast<size_t>(-1);
  }
  return x;
}

Labelled summed(Importer& m, const Labelled& x, const std::string& kept) {
  Ints gone;
  std::string rest;
  for (size_t k = 0; k < x.labels.size(); ++k) {
    if (holds(kept, x.labels[k]))
      rest.push_back(x.labels[k]);
    else
      gone.push_back(static_cast<int64_t>(k));
  }
  return gone.empty()
             ? x
             : Labelled{m.cast(m.reduce("sum", x.value, gone, false), m.dtype(x.value)), rest};
}

Labelled multiplied(Importer& m, Labelled a, Labelled b, const std::string& kept) {
  a = summed(m, a, kept + b.labels);
  b = summed(m, b, kept + a.labels);
  std::string batch, left, right, over;
  for (char c : a.labels) {
    if (!holds(b.labels, c))
      left.push_back(c);
    else
      (holds(kept, c) ? batch : over).push_back(c);
  }
  for (char c : b.labels) {
    if (!holds(a.labels, c)) right.push_back(c);
  }
  auto sizes = [&](const Labelled& x, const std::string& labels) {
    Dims out;
    for (char c : labels) out.push_back(m.dims(x.value)[x.labels.find(c)]);
    return out;
  };
  Dims shape = sizes(a, batch);
  const Dims other = sizes(b, batch);
  for (size_t k = 0; k < shape.size(); ++k) {  // a size 1 broadcasts
    if (shape[k] == Dim(1)) shape[k] = other[k];
  }
  auto flat = [&](const Labelled& x, const std::string& first, const std::string& second) {
    Dims to = sizes(x, batch);
    to.push_back(ir::product(sizes(x, first)));
    to.push_back(ir::product(sizes(x, second)));
    return m.reshape(ordered(m, x, batch + first + second), to);
  };
  ValueId y = product(m, flat(a, left, over), flat(b, over, right));
  for (const Dim& d : sizes(a, left)) shape.push_back(d);
  for (const Dim& d : sizes(b, right)) shape.push_back(d);
  return {m.reshape(y, shape), batch + left + right};
}

void convert_einsum(Importer& m) {
  std::string equation = m.s("equation", "");
  equation.erase(std::remove(equation.begin(), equation.end(), ' '), equation.end());
  const size_t arrow = equation.find("->");
  std::string inputs = equation.substr(0, arrow);
  std::vector<std::string> terms(1);
  for (char c : inputs) {
    if (c == ',')
      terms.emplace_back();
    else
      terms.back().push_back(c);
  }
  if (terms.size() != m.node().inputs.size()) m.refuse("a term for each operand", equation);
  std::vector<Labelled> parts;
  size_t most = 0;
  std::string all;
  for (size_t k = 0; k < terms.size(); ++k) {
    const std::string labels = spelled(m, terms[k], m.rank(m.in(k)), false, &most);
    all += labels;
    parts.push_back(without_repeats(m, {m.in(k), labels}));
  }
  std::string out;
  if (arrow != std::string::npos) {
    out = spelled(m, equation.substr(arrow + 2), 0, true, &most);
  } else {
    for (size_t k = most; k-- > 0;) out.push_back(static_cast<char>('0' + k));
    std::string once = all;
    std::sort(once.begin(), once.end());
    for (char c : once) {
      if (std::isalpha(static_cast<unsigned char>(c)) != 0 &&
          std::count(all.begin(), all.end(), c) == 1)
        out.push_back(c);
    }
  }
  Labelled now = parts[0];
  for (size_t k = 1; k < parts.size(); ++k) {
    std::string kept = out;
    for (size_t later = k + 1; later < parts.size(); ++later) kept += parts[later].labels;
    now = multiplied(m, now, parts[k], kept);
  }
  now = summed(m, now, out);
  std::string seen = now.labels, wanted = out;
  std::sort(seen.begin(), seen.end());
  std::sort(wanted.begin(), wanted.end());
  if (seen != wanted) m.refuse("labels of the operands", equation);
  m.out(ordered(m, now, out));
}

}  // namespace

void add_einsum(Table* table) { (*table)["Einsum"] = convert_einsum; }

}  // namespace rm::onnx
