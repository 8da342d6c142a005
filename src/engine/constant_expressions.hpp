// Which values of a static graph are constant, what names their content, and how they are computed.
#pragma once

#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "select/prepared_kernels.hpp"
#include "runtime/constant_store.hpp"

namespace rm::engine {

struct ConstantAnalysis {
  std::vector<char> is_constant;    // by value: weights, literals and what derives from them alone
  std::vector<std::string> keys;    // by value: content key of constants, empty otherwise
  std::vector<int32_t> body;        // node indices that stay in the plan
  std::vector<ir::ValueId> needed;  // constants the body or the outputs use
};

ConstantAnalysis analyse_constants(const ir::Graph& graph);

/// Fills the store with every needed constant (weights must be there under "w:<name>"), computing
/// what is missing with the same kernels the plan uses, on `stream`; `run_copy` runs them where it is
/// given. Returns them by value id.
std::vector<runtime::ConstantPtr> materialise_constants(const ir::Graph& graph,
                                                        const ConstantAnalysis& analysis,
                                                        select::PreparedCache& kernels,
                                                        runtime::ConstantStore& store,
                                                        rm_stream* stream = nullptr,
                                                        const runtime::RunCopy& run_copy = {});

}  // namespace rm::engine
