// Operators that run subgraphs. Conditions, trip counts and lengths are known when the program is
// made, so a branch is the one that is taken and a loop is its steps one after the other.
#include <algorithm>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxSteps = 4096;

using Entry = Importer::Entry;

Graph subgraph(Importer& m, std::string_view name) {
  const Attribute* a = m.attribute(name);
  if (a == nullptr || !a->has_graph) m.refuse("a subgraph '" + std::string(name) + "'", "none");
  return read_graph(a->graph);
}

void convert_if(Importer& m) {
  const Graph branch = subgraph(m, m.condition(m.entry(0)) ? "then_branch" : "else_branch");
  std::vector<Entry> results = m.inlined(branch, {});
  for (size_t k = 0; k < m.node().outputs.size() && k < results.size(); ++k) {
    m.out_entry(results[k], k);
  }
}

// The node may name fewer results than its body has, not more.
void check_results(Importer& m, size_t of_body) {
  const size_t named = m.node().outputs.size();
  if (named > of_body) {
    m.refuse("at most " + std::to_string(of_body) + " results", std::to_string(named));
  }
}

// Values of all steps, one after the other along a new axis in front or along `axis`.
void stack(Importer& m, std::vector<std::vector<ValueId>>& steps, size_t state, bool reversed,
           int64_t axis, size_t output) {
  std::vector<ValueId>& parts = steps[output - state];
  if (parts.empty()) m.refuse("at least one step", "none");
  for (ValueId& part : parts) {
    Dims shape = m.dims(part);
    const int64_t at = m.axis(axis, shape.size() + 1);
    shape.insert(shape.begin() + at, Dim(1));
    part = m.reshape(part, shape);
  }
  if (reversed) std::reverse(parts.begin(), parts.end());
  m.out(m.concat(parts, m.axis(axis, m.rank(parts[0]))), output);
}

void convert_loop(Importer& m) {
  const Graph body = subgraph(m, "body");
  int64_t count = kMaxSteps + 1;
  if (m.has(0)) count = m.integer(0, "a number of steps");
  bool goes_on = !m.has(1) || m.condition(m.entry(1));
  std::vector<Entry> state;
  for (size_t k = 2; k < m.node().inputs.size(); ++k) state.push_back(m.entry(k));
  if (body.inputs.size() != state.size() + 2 || body.outputs.size() < state.size() + 1) {
    m.refuse("a body with the state of the loop", "another body");
  }
  check_results(m, body.outputs.size() - 1);
  std::vector<std::vector<ValueId>> scanned(body.outputs.size() - 1 - state.size());
  for (int64_t step = 0; goes_on && step < count; ++step) {
    if (step >= kMaxSteps) m.refuse("at most " + std::to_string(kMaxSteps) + " steps", "more");
    Entry number, condition;
    number.sizes = Dims{Dim(step)};
    number.is_scalar = true;
    condition.id = m.graph().add_literal({ir::DType::kBool, {}}, std::string(1, 1));
    std::vector<Entry> inputs{number, condition};
    inputs.insert(inputs.end(), state.begin(), state.end());
    std::vector<Entry> results = m.inlined(body, inputs);
    goes_on = m.condition(results[0]);
    for (size_t k = 0; k < state.size(); ++k) state[k] = results[1 + k];
    for (size_t k = 0; k < scanned.size(); ++k) {
      scanned[k].push_back(m.tensor(results[1 + state.size() + k]));
    }
  }
  for (size_t k = 0; k < m.node().outputs.size(); ++k) {
    if (k < state.size())
      m.out_entry(state[k], k);
    else if (m.wants(k))
      stack(m, scanned, state.size(), false, 0, k);
  }
}

int64_t at_or(const std::optional<Ints>& list, size_t k, int64_t otherwise) {
  return list && k < list->size() ? (*list)[k] : otherwise;
}

// The element `step` of an axis, without the axis.
ValueId element(Importer& m, ValueId x, int64_t axis, int64_t step) {
  Dims shape = m.dims(x);
  if (axis >= static_cast<int64_t>(shape.size())) {
    m.refuse("an axis " + std::to_string(axis), std::to_string(shape.size()) + " axes");
  }
  shape.erase(shape.begin() + axis);
  return m.reshape(m.slice(x, axis, Dim(step), Dim(step + 1), 1), shape);
}

void convert_scan(Importer& m) {
  const Graph body = subgraph(m, "body");
  const auto scans = static_cast<size_t>(std::max<int64_t>(m.i("num_scan_inputs", 0), 0));
  const size_t first = m.opset() < 9 ? 1 : 0;  // opset 8: lengths first, and a batch axis
  const size_t given = m.node().inputs.size();
  if (scans < 1 || scans + first > given || body.inputs.size() + first != given ||
      body.outputs.size() < given - first - scans) {
    m.refuse("a body with the state of the scan", "another body");
  }
  check_results(m, body.outputs.size());
  if (first == 1 && m.has(0)) m.refuse("sequences of one length", "lengths");
  const size_t states = given - first - scans;
  const auto axes = m.ints("scan_input_axes"),
             backwards = m.ints(first == 1 ? "directions" : "scan_input_directions"),
             out_axes = m.ints("scan_output_axes"),
             out_backwards = m.ints("scan_output_directions");
  auto run = [&](std::vector<Entry> state, const std::vector<ValueId>& xs,
                 std::vector<std::vector<ValueId>>* scanned) {
    int64_t count = -1;
    std::vector<int64_t> along;
    for (size_t k = 0; k < scans; ++k) {
      along.push_back(m.axis(at_or(axes, k, 0), m.rank(xs[k])));
      const int64_t n = m.fixed(m.dims(xs[k])[static_cast<size_t>(along[k])]);
      if (count >= 0 && n != count) m.refuse("sequences of one length", "several");
      count = n;
    }
    if (count > kMaxSteps) m.refuse("at most " + std::to_string(kMaxSteps) + " steps", "more");
    for (int64_t step = 0; step < count; ++step) {
      std::vector<Entry> inputs = state;
      for (size_t k = 0; k < scans; ++k) {
        const int64_t at = at_or(backwards, k, 0) != 0 ? count - 1 - step : step;
        Entry e;
        e.id = element(m, xs[k], along[k], at);
        inputs.push_back(e);
      }
      std::vector<Entry> results = m.inlined(body, inputs);
      for (size_t k = 0; k < states; ++k) state[k] = results[k];
      for (size_t k = 0; k < scanned->size(); ++k) {
        (*scanned)[k].push_back(m.tensor(results[states + k]));
      }
    }
    return state;
  };
  std::vector<Entry> state;
  std::vector<ValueId> xs;
  for (size_t k = 0; k < states; ++k) state.push_back(m.entry(first + k));
  for (size_t k = 0; k < scans; ++k) xs.push_back(m.in(first + states + k));
  std::vector<std::vector<ValueId>> scanned(body.outputs.size() - states);
  if (first == 1) {
    if (m.fixed(m.dims(xs[0]).at(0)) != 1) m.refuse("one batch at opset 8", "several");
    for (Entry& e : state) e.id = element(m, m.tensor(e), 0, 0), e.sizes.reset();
    for (ValueId& x : xs) x = element(m, x, 0, 0);
  }
  state = run(std::move(state), xs, &scanned);
  for (size_t k = 0; k < m.node().outputs.size(); ++k) {
    if (k < states) {
      if (first == 1) {
        Dims shape = m.dims(m.tensor(state[k]));
        shape.insert(shape.begin(), Dim(1));
        m.out(m.reshape(m.tensor(state[k]), shape), k);
      } else {
        m.out_entry(state[k], k);
      }
    } else if (m.wants(k)) {
      if (first == 1) {
        for (ValueId& part : scanned[k - states]) {
          Dims shape = m.dims(part);
          shape.insert(shape.begin(), Dim(1));
          part = m.reshape(part, shape);
        }
        stack(m, scanned, states, false, 1, k);
      } else {
        stack(m, scanned, states, at_or(out_backwards, k - states, 0) != 0,
              at_or(out_axes, k - states, 0), k);
      }
    }
  }
}

}  // namespace

void add_control(Table* table) {
  Table& t = *table;
  t["If"] = convert_if;
  t["Loop"] = convert_loop;
  t["Scan"] = convert_scan;
}

}  // namespace rm::onnx
