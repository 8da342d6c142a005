// Attention, rotary positions, and the recurrent kinds of attention and convolution.
#include <algorithm>
#include <cmath>
#include <limits>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

// [B,S,H*D] -> [B,H,S,D]
ValueId to_heads(Importer& m, ValueId x, int64_t heads) {
  const Dims d = m.dims(x);
  if (heads < 1 || d.size() != 3) m.refuse("a number of heads", std::to_string(heads));
  const Dim each = Dim::floordiv(d[2], Dim(heads));
  return m.permute(m.reshape(x, {d[0], d[1], Dim(heads), each}), {0, 2, 1, 3});
}

ValueId from_heads(Importer& m, ValueId x) {
  const Dims d = m.dims(x);
  return m.reshape(m.permute(x, {0, 2, 1, 3}), {d[0], d[2], d[1] * d[3]});
}

ValueId both(Importer& m, ValueId a, ValueId b) {
  return a == ir::kNoValue ? b : m.op("and", {a, b});
}

struct Mask {
  ValueId allowed = ir::kNoValue;  // bool, broadcasts to [B,H,S,T]
  ValueId added = ir::kNoValue;    // float, broadcasts to [B,H,S,T]
};

// The given mask, longer keys are masked.
void add_given(Importer& m, ValueId mask, const Dim& keys, ir::DType dtype, Mask* out) {
  const bool is_bool = m.dtype(mask) == ir::DType::kBool;
  Dims shape = m.dims(mask);
  if (shape.empty() || shape.size() > 4) m.refuse("a mask of 1 to 4 axes", m.type(mask).str());
  const Dim missing = keys - shape.back();
  if (missing.is_static() && missing.value() > 0 && shape.back() != Dim(1)) {
    shape.back() = missing;
    ValueId fill = m.number(mask, is_bool ? 0 : -std::numeric_limits<double>::infinity());
    mask = m.concat({mask, m.expand(fill, shape)}, static_cast<int64_t>(shape.size()) - 1);
  }
  shape = m.dims(mask);
  shape.insert(shape.begin(), 4 - shape.size(), Dim(1));
  mask = m.reshape(mask, shape);
  if (is_bool)
    out->allowed = mask;
  else
    out->added = m.cast(mask, dtype);
}

// Where keys lie relative to queries: causal, windows, and the length of a cache.
void add_places(Importer& m, const Dims& q, const Dim& keys, const Dim& before, bool is_plain,
                Mask* out) {
  const bool causal = m.i("is_causal", 0) != 0;
  const int64_t left = m.i("left_window_size", -1), right = m.i("right_window_size", -1);
  ValueId key = m.reshape(m.count(keys), {Dim(1), Dim(1), Dim(1), keys});
  ValueId length = ir::kNoValue;
  if (m.has(6)) {
    length = m.reshape(m.cast(m.in(6), ir::DType::kI64), {q[0], Dim(1), Dim(1), Dim(1)});
    out->allowed = both(m, out->allowed, m.op("lt", {key, length}));
  }
  if ((!causal || is_plain) && left < 0 && right < 0) return;
  ValueId query;  // its place among the keys
  if (length != ir::kNoValue) {
    ValueId number = m.reshape(m.count(q[2]), {Dim(1), Dim(1), q[2], Dim(1)});
    ValueId queries = m.op("dim_value", {}, {{"value", Dims{q[2]}}});
    query = m.op("add", {number, m.op("sub", {length, queries})});
  } else {
    query = m.reshape(m.count(q[2], before), {Dim(1), Dim(1), q[2], Dim(1)});
  }
  if (causal && !is_plain) out->allowed = both(m, out->allowed, m.op("le", {key, query}));
  if (left >= 0) {
    ValueId first = m.op("sub", {query, m.number(query, static_cast<double>(left))});
    out->allowed = both(m, out->allowed, m.op("ge", {key, first}));
  }
  if (right >= 0) {
    ValueId last = m.op("add", {query, m.number(query, static_cast<double>(right))});
    out->allowed = both(m, out->allowed, m.op("le", {key, last}));
  }
}

ValueId bias_of(Importer& m, const Mask& mask, ir::DType dtype) {
  if (mask.allowed == ir::kNoValue) return mask.added;
  const double inf = std::numeric_limits<double>::infinity();
  ValueId zero = ir::add_scalar(m.graph(), dtype, 0), low = ir::add_scalar(m.graph(), dtype, -inf);
  return m.op("where", {mask.allowed, mask.added == ir::kNoValue ? zero : mask.added, low});
}

// [B,G,T,D] -> [B,G*times,T,D], each head `times` times.
ValueId repeated(Importer& m, ValueId x, int64_t times) {
  const Dims d = m.dims(x);
  if (times == 1) return x;
  ValueId wide = m.expand(m.reshape(x, {d[0], d[1], Dim(1), d[2], d[3]}),
                          {d[0], d[1], Dim(times), d[2], d[3]});
  return m.reshape(wide, {d[0], d[1] * Dim(times), d[2], d[3]});
}

// The steps one by one: for a cap on the scores, or where the scores are a result.
ValueId spelled_out(Importer& m, ValueId q, ValueId k, ValueId v, const Mask& mask, double scale) {
  const int64_t times = m.fixed(m.dims(q)[1]) / std::max<int64_t>(m.fixed(m.dims(k)[1]), 1);
  const int64_t mode = m.i("qk_matmul_output_mode", 0);
  const double cap = m.f("softcap", 0);
  k = repeated(m, k, times);
  v = repeated(m, v, times);
  ValueId scores =
      m.op("matmul", {m.op("mul", {q, m.number(q, scale)}), m.permute(k, {0, 1, 3, 2})});
  if (mode == 0) m.out(scores, 3);
  if (cap > 0) {
    ValueId bent = m.op("tanh", {m.op("div", {scores, m.number(scores, cap)})});
    scores = m.op("mul", {bent, m.number(scores, cap)});
  }
  if (mode == 1) m.out(scores, 3);
  ValueId bias = bias_of(m, mask, m.dtype(q));
  if (bias != ir::kNoValue) scores = m.op("add", {scores, bias});
  if (mode == 2) m.out(scores, 3);
  const ir::DType dtype = m.dtype(q);
  ValueId wide = dtype == ir::DType::kF64 ? scores : m.cast(scores, ir::DType::kF32);
  ValueId p = m.cast(m.op("softmax", {wide}, {{"axis", int64_t{3}}, {"log", int64_t{0}}}), dtype);
  if (bias != ir::kNoValue) {  // a row with every key masked
    ValueId high = m.reduce("max", bias, {static_cast<int64_t>(m.rank(bias)) - 1}, true);
    ValueId none = m.op("eq", {high, m.number(high, -std::numeric_limits<double>::infinity())});
    p = m.op("where", {none, m.number(p, 0), p});
  }
  if (mode == 3) m.out(p, 3);
  return m.op("matmul", {p, v});
}

void convert_attention(Importer& m) {
  ValueId q = m.in(0), k = m.in(1), v = m.in(2);
  const bool is_flat = m.rank(q) == 3;
  if (is_flat) {
    q = to_heads(m, q, m.i("q_num_heads", 0));
    k = to_heads(m, k, m.i("kv_num_heads", 0));
    v = to_heads(m, v, m.i("kv_num_heads", 0));
  }
  if (m.rank(q) != 4 || m.rank(k) != 4 || m.rank(v) != 4)
    m.refuse("q, k and v of 3 or 4 axes", m.type(q).str());
  Dim before(0);
  if (m.has(4)) {
    before = m.dims(m.in(4)).at(2);
    k = m.concat({m.in(4), k}, 2);
    v = m.concat({m.in(5), v}, 2);
  }
  m.out(k, 1);
  m.out(v, 2);
  const Dims dq = m.dims(q);
  const Dim keys = m.dims(k)[2];
  const double scale =
      m.attribute("scale") ? m.f("scale", 1) : 1 / std::sqrt(static_cast<double>(m.fixed(dq[3])));
  const bool is_spelled = m.f("softcap", 0) > 0 || m.wants(3);
  Mask mask;
  if (m.has(3)) add_given(m, m.in(3), keys, m.dtype(q), &mask);
  const bool is_plain = !is_spelled && !m.has(3) && !m.has(4) && !m.has(6) &&
                        m.i("left_window_size", -1) < 0 && m.i("right_window_size", -1) < 0;
  add_places(m, dq, keys, before, is_plain, &mask);
  ValueId y;
  if (is_spelled) {
    y = spelled_out(m, q, k, v, mask, scale);
  } else {
    std::vector<ValueId> operands{q, k, v};
    ValueId chosen = mask.added == ir::kNoValue ? mask.allowed : bias_of(m, mask, m.dtype(q));
    if (chosen != ir::kNoValue) operands.push_back(chosen);
    const int64_t causal = is_plain ? m.i("is_causal", 0) : 0;
    y = m.op("sdpa", operands, {{"scale", scale}, {"is_causal", causal}});
  }
  m.out(is_flat ? from_heads(m, y) : y);
}

// x cos + rotate(x) sin over the first `dim` elements of each head.
void convert_rotary(Importer& m) {
  ValueId x = m.in(0), cos = m.in(1), sin = m.in(2);
  const Dims given = m.dims(x);
  if (given.size() == 3) x = to_heads(m, x, m.i("num_heads", 0));
  const Dims d = m.dims(x);
  if (d.size() != 4) m.refuse("3 or 4 axes", m.type(x).str());
  if (m.has(3)) {
    cos = m.take(cos, 0, m.in(3));
    sin = m.take(sin, 0, m.in(3));
  }
  const int64_t size = m.fixed(d[3]), named = m.i("rotary_embedding_dim", 0),
                dim = named == 0 ? size : named;
  if (dim < 2 || dim > size || dim % 2 != 0)
    m.refuse("an even number of elements to turn", std::to_string(dim));
  const Dims dc = m.dims(cos);
  if (dc.size() != 3) m.refuse("angles of each place", m.type(cos).str());
  auto spread = [&](ValueId v) { return m.reshape(v, {dc[0], Dim(1), dc[1], dc[2]}); };
  cos = spread(cos);
  sin = spread(sin);
  ValueId turned = m.slice(x, 3, Dim(0), Dim(dim), 1), y;
  if (m.i("interleaved", 0) == 0) {
    ValueId first = m.slice(turned, 3, Dim(0), Dim(dim / 2), 1),
            second = m.slice(turned, 3, Dim(dim / 2), Dim(dim), 1);
    ValueId rotated = m.concat({m.op("neg", {second}), first}, 3);
    y = m.op("add", {m.op("mul", {turned, m.concat({cos, cos}, 3)}),
                     m.op("mul", {rotated, m.concat({sin, sin}, 3)})});
  } else {
    ValueId even = m.slice(turned, 3, Dim(0), Dim(dim), 2),
            odd = m.slice(turned, 3, Dim(1), Dim(dim), 2);
    ValueId real = m.op("sub", {m.op("mul", {cos, even}), m.op("mul", {sin, odd})});
    ValueId imag = m.op("add", {m.op("mul", {sin, even}), m.op("mul", {cos, odd})});
    const Dims half{d[0], d[1], d[2], Dim(dim / 2), Dim(1)};
    y = m.reshape(m.concat({m.reshape(real, half), m.reshape(imag, half)}, 4),
                  {d[0], d[1], d[2], Dim(dim)});
  }
  if (dim < size) y = m.concat({y, m.slice(x, 3, Dim(dim), Dim(size), 1)}, 3);
  m.out(given.size() == 3 ? from_heads(m, y) : y);
}

// A state [B,H,K,V] that each step fades, corrects and adds k vᵀ to; q reads from it.
void convert_linear_attention(Importer& m) {
  const int64_t heads = m.i("q_num_heads", 0), kv = m.i("kv_num_heads", 0);
  const std::string rule = m.s("update_rule", "gated_delta");
  const bool gated = rule == "gated" || rule == "gated_delta",
             delta = rule == "delta" || rule == "gated_delta";
  if (kv < 1 || heads < 1 || heads % kv != 0 || (!gated && !delta && rule != "linear"))
    m.refuse("heads and a rule", rule);
  const ir::DType f32 = ir::DType::kF32;
  auto unpacked = [&](size_t k, int64_t n) { return m.cast(to_heads(m, m.in(k), n), f32); };
  ValueId q = unpacked(0, heads), k = unpacked(1, kv), v = unpacked(2, kv);
  const Dims dk = m.dims(k), dv = m.dims(v);
  const int64_t steps = m.fixed(dk[2]), size = m.fixed(dk[3]);
  if (steps < 1 || steps > 4096) m.refuse("1 to 4096 steps", std::to_string(steps));
  ValueId decay = gated ? m.op("exp", {unpacked(4, kv)}) : ir::kNoValue;
  ValueId beta = delta ? unpacked(5, m.fixed(m.dims(m.in(5)).at(2))) : ir::kNoValue;
  ValueId state = m.has(3)
                      ? m.cast(m.in(3), f32)
                      : m.expand(ir::add_scalar(m.graph(), f32, 0), {dk[0], Dim(kv), dk[3], dv[3]});
  const double given = m.f("scale", 0),
               scale = given == 0 ? 1 / std::sqrt(static_cast<double>(size)) : given;
  q = m.op("mul", {q, m.number(q, scale)});
  auto at = [&](ValueId x, int64_t t) { return m.slice(x, 2, Dim(t), Dim(t + 1), 1); };
  std::vector<ValueId> rows;
  for (int64_t t = 0; t < steps; ++t) {
    ValueId key = m.permute(at(k, t), {0, 1, 3, 2}), value = at(v, t);
    if (gated) state = m.op("mul", {state, m.permute(at(decay, t), {0, 1, 3, 2})});
    if (delta) {
      ValueId seen = m.op("matmul", {at(k, t), state});
      value = m.op("mul", {at(beta, t), m.op("sub", {value, seen})});
    }
    state = m.op("add", {state, m.op("mul", {key, value})});
    rows.push_back(m.op("matmul", {at(q, t), repeated(m, state, heads / kv)}));
  }
  const ir::DType dtype = m.dtype(m.in(0));
  m.out(m.cast(from_heads(m, m.concat(rows, 2)), dtype));
  m.out(m.cast(state, m.has(3) ? m.dtype(m.in(3)) : dtype), 1);
}

// A convolution of each channel over what was and what is.
void convert_causal_conv(Importer& m) {
  ValueId x = m.in(0), w = m.in(1);
  const Dims d = m.dims(x);
  if (d.size() != 3 || m.rank(w) != 3) m.refuse("[B,C,L] and [C,1,k]", m.type(x).str());
  const int64_t reach = m.fixed(m.dims(w)[2]) - 1, channels = m.fixed(d[1]);
  ValueId before = m.has(3) ? m.in(3) : m.expand(m.number(x, 0), {d[0], d[1], Dim(reach)});
  ValueId all = reach == 0 && !m.has(3) ? x : m.concat({before, x}, 2);
  std::vector<ValueId> operands{all, w};
  if (m.has(2)) operands.push_back(m.in(2));
  ValueId y = m.op("conv", operands, {{"groups", channels}});
  const std::string activation = m.s("activation", "none");
  if (activation == "silu" || activation == "swish")
    y = m.op("silu", {y});
  else if (activation != "none")
    m.refuse("none, silu or swish", activation);
  m.out(y);
  const Dim length = m.dims(all)[2];
  m.out(m.slice(all, 2, length - Dim(reach), length, 1), 1);
}

}  // namespace

void add_attention(Table* table) {
  Table& t = *table;
  t["Attention"] = convert_attention;
  t["RotaryEmbedding"] = convert_rotary;
  t["LinearAttention"] = convert_linear_attention;
  t["CausalConvWithState"] = convert_causal_conv;
}

}  // namespace rm::onnx
