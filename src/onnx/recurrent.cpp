// RNN, GRU and LSTM: the steps of a sequence one after the other, so its length is a number.
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxSteps = 1024;

struct Cell {
  std::string op;
  ValueId r, w_bias, r_bias, peep;  // of one direction; kNoValue where absent
  int64_t hidden = 0;
  std::vector<std::string> acts;
};

struct State {
  ValueId h, c = ir::kNoValue;
};

ValueId part(Importer& m, ValueId v, int64_t number, int64_t hidden) {
  const auto last = static_cast<int64_t>(m.rank(v)) - 1;
  return m.slice(v, last, Dim(number * hidden), Dim((number + 1) * hidden), 1);
}

ValueId plus(Importer& m, ValueId a, ValueId b) {
  return b == ir::kNoValue ? a : m.op("add", {a, b});
}

// x [B, gates*H] is already times W and has W's bias.
State step(Importer& m, const Cell& cell, ValueId x, const State& s) {
  const int64_t n = cell.hidden;
  auto act = [&](size_t k, ValueId v) { return m.op(cell.acts[k], {v}); };
  if (cell.op == "RNN") {
    return {act(0, m.op("add", {x, plus(m, m.op("linear", {s.h, cell.r}), cell.r_bias)}))};
  }
  if (cell.op == "GRU") {
    ValueId rows = m.slice(cell.r, 0, Dim(0), Dim(2 * n), 1),
            last = m.slice(cell.r, 0, Dim(2 * n), Dim(3 * n), 1);
    ValueId first_bias =
        cell.r_bias == ir::kNoValue ? cell.r_bias : m.slice(cell.r_bias, 0, Dim(0), Dim(2 * n), 1);
    ValueId last_bias = cell.r_bias == ir::kNoValue
                            ? cell.r_bias
                            : m.slice(cell.r_bias, 0, Dim(2 * n), Dim(3 * n), 1);
    ValueId gates = m.op("add", {m.slice(x, 1, Dim(0), Dim(2 * n), 1),
                                 plus(m, m.op("linear", {s.h, rows}), first_bias)});
    ValueId z = act(0, part(m, gates, 0, n)), r = act(0, part(m, gates, 1, n)), kept;
    if (m.i("linear_before_reset", 0) != 0) {
      kept = m.op("mul", {r, plus(m, m.op("linear", {s.h, last}), last_bias)});
    } else {
      kept = plus(m, m.op("linear", {m.op("mul", {r, s.h}), last}), last_bias);
    }
    ValueId made = act(1, m.op("add", {part(m, x, 2, n), kept}));
    ValueId rest = m.op("sub", {m.number(z, 1), z});
    return {m.op("add", {m.op("mul", {rest, made}), m.op("mul", {z, s.h})})};
  }
  ValueId gates = m.op("add", {x, plus(m, m.op("linear", {s.h, cell.r}), cell.r_bias)});
  auto gate = [&](int64_t k, int64_t peep, ValueId c) {
    ValueId v = part(m, gates, k, n);
    if (cell.peep == ir::kNoValue || peep < 0) return v;
    return m.op("add", {v, m.op("mul", {part(m, cell.peep, peep, n), c})});
  };
  ValueId i = act(0, gate(0, 0, s.c)), f = act(0, gate(2, 2, s.c)), made = act(1, gate(3, -1, s.c));
  ValueId c = m.op("add", {m.op("mul", {f, s.c}), m.op("mul", {i, made})});
  return {m.op("mul", {act(0, gate(1, 1, c)), act(2, c)}), c};
}

// Each sequence backwards within its own length: x [T,B,*].
ValueId backwards(Importer& m, ValueId x, ValueId lengths) {
  if (lengths == ir::kNoValue) return m.reversed(x, 0);
  const Dims d = m.dims(x);
  Dims by_time(d.size(), Dim(1)), by_batch(d.size(), Dim(1));
  by_time[0] = d[0];
  by_batch[1] = d[1];
  ValueId at = m.reshape(m.count(d[0]), by_time), n = m.reshape(lengths, by_batch);
  ValueId back = m.op("sub", {m.op("sub", {n, at}), m.number(n, 1)});
  return m.op("gather", {x, m.expand(m.op("where", {m.op("lt", {at, n}), back, at}), d)},
              {{"axis", int64_t{0}}});
}

ValueId direction(Importer& m, ValueId v, int64_t d) {
  Dims shape = m.dims(v);
  if (shape.empty()) m.refuse("an axis of directions", "a scalar");
  shape.erase(shape.begin());
  return m.reshape(m.slice(v, 0, Dim(d), Dim(d + 1), 1), shape);
}

void convert(Importer& m) {
  const std::string& op = m.node().op;
  const int64_t gates = op == "RNN" ? 1 : op == "GRU" ? 3 : 4;
  const std::string dirs = m.s("direction", "forward");
  const int64_t count = dirs == "bidirectional" ? 2 : 1, layout = m.i("layout", 0);
  if (m.attribute("clip") || m.i("input_forget", 0) != 0)
    m.refuse("a plain cell", "clip or input_forget");
  const Attribute* named = m.attribute("activations");
  if (named != nullptr) m.refuse("the usual activations", "others");
  ValueId x = layout == 0 ? m.in(0) : m.permute(m.in(0), {1, 0, 2}), w = m.in(1), r = m.in(2);
  const Dims dx = m.dims(x);
  if (dx.size() != 3 || m.rank(w) != 3 || m.rank(r) != 3)
    m.refuse("sequences and matrices", m.type(x).str());
  const int64_t steps = m.fixed(dx[0]), hidden = m.fixed(m.dims(r)[2]);
  if (steps < 1 || steps > kMaxSteps)
    m.refuse("1 to " + std::to_string(kMaxSteps) + " steps", std::to_string(steps));
  ValueId lengths = m.has(4) ? m.cast(m.in(4), ir::DType::kI64) : ir::kNoValue;
  std::vector<ValueId> all, last_h, last_c;
  for (int64_t d = 0; d < count; ++d) {
    const bool is_back = dirs == "reverse" || d == 1;
    Cell cell{op, direction(m, r, d), ir::kNoValue, ir::kNoValue, ir::kNoValue, hidden, {}};
    cell.acts = op == "RNN" ? std::vector<std::string>{"tanh"}
                            : std::vector<std::string>{"sigmoid", "tanh", "tanh"};
    std::vector<ValueId> operands{is_back ? backwards(m, x, lengths) : x, direction(m, w, d)};
    if (m.has(3)) {
      ValueId bias = direction(m, m.in(3), d);
      operands.push_back(m.slice(bias, 0, Dim(0), Dim(gates * hidden), 1));
      cell.r_bias = m.slice(bias, 0, Dim(gates * hidden), Dim(2 * gates * hidden), 1);
    }
    if (m.has(7) && op == "LSTM") cell.peep = direction(m, m.in(7), d);
    ValueId projected = m.op("linear", operands);
    auto initial = [&](size_t k) {
      if (!m.has(k)) return m.expand(m.number(x, 0), {dx[1], Dim(hidden)});
      return direction(m, layout == 0 ? m.in(k) : m.permute(m.in(k), {1, 0, 2}), d);
    };
    State s{initial(5), op == "LSTM" ? initial(6) : ir::kNoValue};
    std::vector<ValueId> rows;
    for (int64_t t = 0; t < steps; ++t) {
      ValueId now =
          m.reshape(m.slice(projected, 0, Dim(t), Dim(t + 1), 1), {dx[1], Dim(gates * hidden)});
      State made = step(m, cell, now, s);
      ValueId shown = made.h;
      if (lengths != ir::kNoValue) {  // behind its end a sequence keeps its state and shows zeros
        ValueId goes_on = m.reshape(
            m.op("gt", {lengths, m.number(lengths, static_cast<double>(t))}), {dx[1], Dim(1)});
        shown = m.op("where", {goes_on, made.h, m.number(made.h, 0)});
        made.h = m.op("where", {goes_on, made.h, s.h});
        if (made.c != ir::kNoValue) made.c = m.op("where", {goes_on, made.c, s.c});
      }
      s = made;
      rows.push_back(m.reshape(shown, {Dim(1), dx[1], Dim(hidden)}));
    }
    if (m.wants(0)) {
      ValueId y = m.concat(rows, 0);
      if (is_back) y = backwards(m, y, lengths);
      all.push_back(m.reshape(y, {dx[0], Dim(1), dx[1], Dim(hidden)}));
    }
    const Dims one{Dim(1), dx[1], Dim(hidden)};
    last_h.push_back(m.reshape(s.h, one));
    if (s.c != ir::kNoValue) last_c.push_back(m.reshape(s.c, one));
  }
  auto placed = [&](ValueId v) { return layout == 0 ? v : m.permute(v, {1, 0, 2}); };
  if (m.wants(0)) {
    ValueId y = m.concat(all, 1);
    m.out(layout == 0 ? y : m.permute(y, {2, 0, 1, 3}));
  }
  m.out(placed(m.concat(last_h, 0)), 1);
  if (!last_c.empty()) m.out(placed(m.concat(last_c, 0)), 2);
}

}  // namespace

void add_recurrent(Table* table) {
  for (const char* name : {"RNN", "GRU", "LSTM"}) (*table)[name] = convert;
}

}  // namespace rm::onnx
