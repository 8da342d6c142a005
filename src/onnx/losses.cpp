// Losses over classes: the logarithm of the probability of the target, weighted, over what counts.
#include <limits>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

// log_p [N,C,*], target [N,*]; targets equal to ignore_index give 0 and count nothing.
void finish(Importer& m, ValueId log_p, ValueId target, ValueId weight) {
  const Dims d = m.dims(log_p), places = m.dims(target);
  if (d.size() < 2 || places.size() + 1 != d.size())
    m.refuse("a target for each place", m.type(target).str());
  target = m.cast(target, ir::DType::kI64);
  ValueId counts = ir::kNoValue;
  if (m.attribute("ignore_index")) {
    ValueId ignored =
        m.op("eq", {target, m.number(target, static_cast<double>(m.i("ignore_index", 0)))});
    target = m.op("where", {ignored, m.number(target, 0), target});
    counts = m.cast(m.op("logical_not", {ignored}), m.dtype(log_p));
  }
  Dims one = places;
  one.insert(one.begin() + 1, Dim(1));
  ValueId chosen = m.op("gather", {log_p, m.reshape(target, one)}, {{"axis", int64_t{1}}});
  ValueId loss = m.op("neg", {m.reshape(chosen, places)});
  if (weight != ir::kNoValue) {
    ValueId each = m.cast(m.take(weight, 0, target), m.dtype(log_p));
    counts = counts == ir::kNoValue ? each : m.op("mul", {counts, each});
  }
  if (counts != ir::kNoValue) {  // not a product: an ignored place may hold -inf
    loss = m.op("where", {m.op("eq", {counts, m.number(counts, 0)}), m.number(loss, 0),
                          m.op("mul", {loss, counts})});
  }
  const std::string kind = m.s("reduction", "mean");
  if (kind == "none") return m.out(loss);
  Ints axes;
  for (size_t k = 0; k < places.size(); ++k) axes.push_back(static_cast<int64_t>(k));
  if (kind == "sum") return m.out(m.reduce("sum", loss, axes, false));
  if (kind != "mean") m.refuse("none, sum or mean", kind);
  if (counts == ir::kNoValue) return m.out(m.reduce("mean", loss, axes, false));
  m.out(m.op("div", {m.reduce("sum", loss, axes, false), m.reduce("sum", counts, axes, false)}));
}

}  // namespace

void add_losses(Table* table) {
  (*table)["NegativeLogLikelihoodLoss"] = [](Importer& m) {
    finish(m, m.in(0), m.in(1), m.in_or_none(2));
  };
  (*table)["SoftmaxCrossEntropyLoss"] = [](Importer& m) {
    ValueId log_p = m.op("softmax", {m.in(0)}, {{"axis", int64_t{1}}, {"log", int64_t{1}}});
    finish(m, log_p, m.in(1), m.in_or_none(2));
    m.out(log_p, 1);
  };
}

}  // namespace rm::onnx
