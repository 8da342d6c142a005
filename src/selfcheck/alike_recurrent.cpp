// A small problem for a recurrent layer: three steps, and sizes at the same place between vectors,
// tiles of rows and the sums that a kernel takes side by side.
#include <algorithm>

#include "selfcheck/alike.hpp"

namespace rm::selfcheck {
namespace {

constexpr int64_t kSteps = 3;  // two kinds of states are read and written in turn
constexpr int64_t kVector = 16, kTile = 4;

}  // namespace

bool reduce_recurrent(Shape& s) {
  if (s.op != "recurrent") return false;
  const size_t time = attr_or<int64_t>(s, "batch_first", 0) != 0 ? 1 : 0;
  const ir::Ints x = s.inputs[0].layout.dims, w = s.inputs[1].layout.dims;
  const bool has_proj = s.inputs.size() > 5 && s.inputs[5].present;
  const std::string cell = std::get<std::string>(s.attrs.at("cell"));
  const int64_t gates = cell == "lstm" ? 4 : cell == "gru" ? 3 : 1;
  const int64_t steps = std::min(x[time], kSteps), batch = alike_size(x[1 - time], {kTile});
  const int64_t hidden = alike_size(w[0] / gates, {kVector});
  const int64_t out = has_proj ? alike_size(w[1], {kVector}) : hidden;
  const auto sequence = [&](int64_t last) {
    return time == 0 ? ir::Ints{steps, batch, last} : ir::Ints{batch, steps, last};
  };
  const auto lay_out = [](select::Operand& o, const ir::Ints& dims) {
    if (o.present) o.layout = laid_out(o.layout, dims);
  };
  const ir::Ints inputs[] = {sequence(gates * hidden), {gates * hidden, out}, {batch, out},
                             {batch, hidden},          {gates * hidden},      {out, hidden}};
  const ir::Ints outputs[] = {sequence(out), {batch, out}, {batch, hidden}};
  for (size_t i = 0; i < s.inputs.size(); ++i) lay_out(s.inputs[i], inputs[i]);
  for (size_t i = 0; i < s.outputs.size(); ++i) lay_out(s.outputs[i], outputs[i]);
  return true;
}

}  // namespace rm::selfcheck
