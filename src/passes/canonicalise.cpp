// The list of rules that give every graph one form; see rules/.
#include "passes/passes.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {

void canonicalise(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {drop_identity_view,       compose_reshapes,
                        compose_permutes,         compose_slices,
                        compose_expands,          permute_of_ones_is_reshape,
                        view_of_splat_is_full,    simplify_concat,
                        slice_of_concat,          constant_operand_second,
                        drop_identity_arithmetic, drop_identity_logic,
                        square_is_product,        compose_casts,
                        where_of_constant,        compare_ranges,
                        compare_bounds,           all_of_constant,
                        drop_true_check,          index_by_ranges_is_view,
                        sum_of_iota_is_iota,      cumsum_of_zeros_is_zero,
                        sum_of_frames_is_concat,  leave_broadcast_to_consumer});
}

}  // namespace rm::passes
