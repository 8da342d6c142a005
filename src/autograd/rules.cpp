// The families' tables joined, sorted once.
#include "autograd/rules.hpp"

#include <algorithm>

namespace rm::autograd {
namespace {

const std::vector<NamedRule>& table() {
  static const std::vector<NamedRule> sorted = [] {
    std::vector<NamedRule> all;
    for (auto family : {elementwise_rules, shape_rules, product_rules, norm_rules, indexing_rules,
                        image_rules, pool_rules, resize_rules, refused_operators}) {
      std::vector<NamedRule> rows = family();
      all.insert(all.end(), rows.begin(), rows.end());
    }
    std::sort(all.begin(), all.end(),
              [](const NamedRule& a, const NamedRule& b) { return a.op < b.op; });
    return all;
  }();
  return sorted;
}

}  // namespace

const NamedRule* find_rule(std::string_view op) {
  auto it = std::lower_bound(table().begin(), table().end(), op,
                             [](const NamedRule& row, std::string_view name) { return row.op < name; });
  return it != table().end() && it->op == op ? &*it : nullptr;
}

std::vector<NamedRule> refused_operators() {
  constexpr std::string_view kFused = "only passes make it, behind differentiation";
  constexpr std::string_view kGradient = "gradients of gradients are not made";
  constexpr std::string_view kBits = "weights of few bits are not trained";
  return {{"ewise", nullptr, kFused, true},
          {"gemm", nullptr, kFused, true},
          {"rope", nullptr, kFused, true},
          {"sdpa_backward", nullptr, kGradient, true},
          {"cross_entropy_backward", nullptr, kGradient, true},
          {"layer_norm_backward", nullptr, kGradient, true},
          {"rms_norm_backward", nullptr, kGradient, true},
          {"quantize", nullptr, kBits, true},
          {"quant_linear", nullptr, kBits, true},
          {"recurrent", nullptr, "it keeps no states of its steps for a backward", true},
          {"assign", nullptr, "what a step assigns is its last use", true},
          {"adam", nullptr, "it updates what a gradient was computed of", true},
          {"all_reduce_start", nullptr, "gradients themselves are averaged", true},
          {"all_reduce_wait", nullptr, "gradients themselves are averaged", true},
          {"aten", nullptr, "another framework computes it", true}};
}

std::vector<std::string_view> differentiable_operators() {
  std::vector<std::string_view> out;
  for (const NamedRule& row : table()) {
    if (row.rule != nullptr) out.push_back(row.op);
  }
  return out;
}

}  // namespace rm::autograd
