// Two products that need nothing of each other: one launch over the tiles of both, where that was
// measured to be faster than one after the other. Backward's da and db.
#include "gemm/common.hpp"
#include "gemm/timing.hpp"
#include "gemm/wgmma.hpp"

namespace rm::cuda_ops {
namespace {

struct PairPlan {
  const char* name;
  WgmmaPlan plan;  // split: of the deeper product, then of the other
  const char* range;
};

constexpr PairPlan kPlans[] = {
    {"gemm_pair_256_sm90a",
     {256, 1, {}},
     "16-bit floats, both products in one launch; tiles of 128 x 256"},
    {"gemm_pair_256x2_sm90a", {256, 2, {}}, "the same by clusters of two"},
    {"gemm_pair_128_sm90a", {128, 1, {}}, "the same, tiles of 128 x 128"},
    {"gemm_pair_128x2_sm90a", {128, 2, {}}, "the same by clusters of two"},
    {"gemm_pair_128t_sm90a", {128, 1, {}, true}, "the same, epilogues beside products"},
    {"gemm_pair_64_sm90a", {64, 1, {}}, "the same, tiles of 128 x 64"},
    {"gemm_pair_128k2_sm90a",
     {128, 2, {true, false}},
     "128 x 128, the deeper product in two parts of K"},
    {"gemm_pair_128k4_sm90a", {128, 4, {true, false}}, "the same in four parts"},
    {"gemm_pair_64k2_sm90a",
     {64, 2, {true, false}},
     "128 x 64, the deeper product in two parts of K"},
    {"gemm_pair_64k4_sm90a", {64, 4, {true, false}}, "the same in four parts"},
    {"gemm_pair_128k2k2_sm90a",
     {128, 2, {true, true}},
     "128 x 128, both products in two parts of K"},
    {"gemm_pair_64k2k2_sm90a", {64, 2, {true, true}}, "128 x 64, both products in two parts of K"},
};
constexpr int kApart = static_cast<int>(std::size(kPlans));
constexpr const char* kApartName = "gemm_pair_apart_any";

Status run_pair(const Gemm& first, const Gemm& second, const ColumnSums& sums, int plan,
                Workspace workspace, Stream stream) {
  if (plan == kApart) {
    if (Status s = launch_column_sums(first.c.dtype, sums, stream); !s) return s;
    if (Status s = gemm(first, "", workspace, stream); !s) return s;
    return gemm(second, "", workspace, stream);
  }
  // the deeper product's tiles take longest: they start first
  const bool in_order = gemm_shape(first).k >= gemm_shape(second).k;
  return in_order ? launch_wgmma_pair(first, &second, kPlans[plan].plan, sums, stream)
                  : launch_wgmma_pair(second, &first, kPlans[plan].plan, sums, stream);
}

}  // namespace

std::vector<std::pair<const char*, const char*>> gemm_pair_rows() {
  std::vector<std::pair<const char*, const char*>> out;
  for (const PairPlan& p : kPlans) out.emplace_back(p.name, p.range);
  out.emplace_back(kApartName, "any problem: one after the other, each by its own row");
  return out;
}

Status gemm_pair(const Gemm& first, const Gemm& second, const ColumnSums& sums, const char* kernel,
                 Workspace workspace, Stream stream) {
  const std::string wanted = kernel ? kernel : "";
  const bool possible = numel(first.c) > 0 && numel(second.c) > 0 &&
                        wgmma_why_not(first) == nullptr && wgmma_why_not(second) == nullptr;
  if (!wanted.empty() && wanted != kApartName) {
    for (int plan = 0; plan < kApart; ++plan) {
      if (wanted != kPlans[plan].name) continue;
      if (possible) return run_pair(first, second, sums, plan, workspace, stream);
      return unsupported("[gemm] expected two products of 16-bit floats that wgmma supports, got " +
                         wanted + " for others; try kernel=\"\"");
    }
    return unsupported("[gemm] expected a name of backward_kernels(), got " + wanted);
  }
  if (!possible || !wanted.empty() || first.library == nullptr) {
    return run_pair(first, second, sums, kApart, workspace, stream);
  }
  const std::string key = choice_key(first, workspace.bytes) + choice_key(second, workspace.bytes) +
                          (sums.columns ? "+" : "");
  int best = first.library->known_row(key);
  if (best < 0 && first.tune && may_repeat(first) && may_repeat(second) && !is_capturing(stream)) {
    const auto multiplications = [](const Gemm& p) {
      const GemmShape s = gemm_shape(p);
      return static_cast<double>(s.m * s.n) * static_cast<double>(s.k * s.batch);
    };
    const double about_us =
        (multiplications(first) + multiplications(second)) * 2 / compute_rate(600e6);
    TimedChoice choice(stream, {}, about_us);
    for (int plan = kApart; plan >= 0; --plan) {  // apart first: it tunes the single products
      const auto run = [&](Stream on) {
        return run_pair(first, second, sums, plan, workspace, on);
      };
      if (Status s = choice.add(plan, run); !s) return s;
    }
    if (Status s = choice.fastest(&best); !s) return s;
    if (best >= 0) first.library->remember_row(key, best);
  }
  return run_pair(first, second, sums, best < 0 ? kApart : best, workspace, stream);
}

}  // namespace rm::cuda_ops
