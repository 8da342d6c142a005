// Lowering, kernel binding, the memory planner and the plan verifier, over fake kernels.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "base/error.hpp"
#include "ir/text.hpp"
#include "plan/lower.hpp"
#include "plan/plan.hpp"

using namespace rm;
using namespace rm::plan;

namespace {

std::shared_ptr<const select::Prepared> fake_kernel(int64_t workspace) {
  auto p = std::make_shared<select::Prepared>();
  p->workspace_bytes = workspace;
  return p;
}

Ref whole(int32_t buffer, int64_t bytes) {
  return {buffer, ir::contiguous(ir::DType::kU8, {bytes})};
}

// A random chain of steps: each writes one new temporary and reads some earlier ones.
Plan random_plan(std::mt19937& rng, int steps) {
  Plan plan;
  for (int s = 0; s < steps; ++s) {
    int64_t bytes = static_cast<int64_t>(1 + rng() % 5000);
    plan.buffers.push_back({BufferKind::kTemp, 0, bytes});
    PlannedStep step;
    step.step.op = "fake";
    step.kernel = fake_kernel(rng() % 3 == 0 ? static_cast<int64_t>(rng() % 3000) : 0);
    for (int r = 0; s > 0 && r < 2; ++r) {
      auto from = static_cast<int32_t>(rng() % static_cast<uint64_t>(s));
      step.step.inputs.push_back(whole(from, plan.buffers[static_cast<size_t>(from)].bytes));
    }
    step.step.outputs.push_back(whole(s, bytes));
    plan.steps.push_back(std::move(step));
  }
  plan.offsets.assign(plan.buffers.size(), -1);
  return plan;
}

LowerRequest request_for(const ir::Graph& graph, std::vector<External>& externals) {
  LowerRequest request;
  request.graph = &graph;
  externals.resize(graph.num_values());
  request.externals.assign(graph.num_values(), nullptr);
  for (size_t i = 0; i < graph.inputs().size(); ++i) {
    auto v = static_cast<size_t>(graph.inputs()[i]);
    ir::Layout layout = ir::contiguous(graph.type(graph.inputs()[i]));
    externals[v] = {BufferKind::kInput, static_cast<int32_t>(i), layout, layout.num_bytes()};
    request.externals[v] = &externals[v];
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) request.nodes.push_back(static_cast<int32_t>(n));
  request.results = graph.outputs;
  return request;
}

StepList lower_text(const char* text) {
  ir::Graph graph = ir::parse(text);
  std::vector<External> externals;
  return lower(request_for(graph, externals));
}

}  // namespace

TEST_CASE("planned memory passes the independent verifier and stays near the lower bound") {
  std::mt19937 rng(5);
  double worst = 1;
  for (int round = 0; round < 150; ++round) {
    Plan plan = random_plan(rng, 2 + static_cast<int>(rng() % 60));
    plan_memory(plan);
    verify_plan(plan);
    CHECK(plan.arena_bytes >= plan.lower_bound_bytes);
    worst = std::max(worst, static_cast<double>(plan.arena_bytes) /
                                static_cast<double>(plan.lower_bound_bytes));
  }
  CHECK(worst < 1.3);
}

TEST_CASE("the verifier refuses overlaps, missing writes and views outside their buffer") {
  std::mt19937 rng(9);
  Plan plan = random_plan(rng, 12);
  plan_memory(plan);
  Plan overlapping = plan;
  int32_t read = overlapping.steps[11].step.inputs[0].buffer;
  overlapping.offsets[static_cast<size_t>(read)] = overlapping.offsets[11];
  CHECK_THROWS_WITH_AS(verify_plan(overlapping), doctest::Contains("overlap"), Error);

  Plan unwritten = plan;
  std::swap(unwritten.steps.front(), unwritten.steps.back());
  CHECK_THROWS_WITH_AS(verify_plan(unwritten), doctest::Contains("write before"), Error);

  Plan outside = plan;
  outside.steps[3].step.outputs[0].layout.offset = 1;
  CHECK_THROWS_WITH_AS(verify_plan(outside), doctest::Contains("inside their buffer"), Error);

  Plan small = plan;
  small.arena_bytes -= kArenaAlignment;
  CHECK_THROWS_AS(verify_plan(small), Error);
}

TEST_CASE("the verifier refuses a read of content that an update has replaced") {
  // 0: a donated input, 1: a temporary. Read, update in place, read the new content.
  Plan plan;
  plan.buffers = {{BufferKind::kInput, 0, 64, true}, {BufferKind::kTemp, 0, 64}};
  plan.offsets.assign(2, -1);
  auto at = [](Ref r, int32_t version) {
    r.version = version;
    return r;
  };
  auto step = [](std::vector<Ref> inputs, std::vector<Ref> outputs, bool updates) {
    return PlannedStep{{"fake", {}, std::move(inputs), std::move(outputs), updates}, fake_kernel(0)};
  };
  const Ref input = whole(0, 64), temporary = whole(1, 64);
  plan.steps = {step({input}, {temporary}, false), step({temporary}, {at(input, 1)}, true),
                step({at(input, 1)}, {at(temporary, 1)}, true)};
  plan.outputs = {at(input, 1), at(temporary, 1)};
  plan_memory(plan);
  verify_plan(plan);

  auto refused = [&](auto change, const char* rule) {
    Plan broken = plan;
    change(broken);
    CHECK_THROWS_WITH_AS(verify_plan(broken), doctest::Contains(rule), Error);
  };
  refused([&](Plan& p) { p.steps[2].step.inputs[0].version = 0; }, "that was overwritten");
  refused([&](Plan& p) { std::swap(p.steps[0], p.steps[1]); }, "write before");
  refused([&](Plan& p) { p.outputs[0].version = 0; }, "last version");
  refused([&](Plan& p) { p.steps[1].step.outputs[0].version = 0; }, "next version");
  refused([&](Plan& p) { p.steps[1].step.inputs[0] = input; }, "does not read what it overwrites");
  refused([&](Plan& p) { p.steps[1].step.updates = false; }, "never written");
  refused([&](Plan& p) { p.buffers[0].donated = false; }, "never written");
  refused([&](Plan& p) { p.steps[2].step = {"fake", {}, {}, {temporary}, false}; },
          "complete before it is read");
}

TEST_CASE("the verifier does not agree with sizes that overflow") {
  Plan plan;
  plan.buffers = {{BufferKind::kInput, 0, 0}, {BufferKind::kTemp, 0, 0}};
  plan.offsets = {-1, 0};
  const int64_t huge = int64_t{1} << 31;
  // 2^62 elements of 4 bytes: 0 bytes modulo 2^64.
  Ref r{1, {ir::DType::kF32, {huge, huge}, {huge, 1}, 0}};
  plan.steps.push_back({{"fake", {}, {}, {r}, false}, fake_kernel(0)});
  CHECK_THROWS_WITH_AS(verify_plan(plan), doctest::Contains("inside their buffer"), Error);
  plan.steps[0].step.outputs[0].layout = {
      ir::DType::kF32, {INT64_MAX, INT64_MAX, INT64_MAX}, {INT64_MAX, INT64_MAX, INT64_MAX}, 0};
  CHECK_THROWS_WITH_AS(verify_plan(plan), doctest::Contains("inside their buffer"), Error);
}

TEST_CASE("views cost no step and outputs are written in place") {
  StepList list = lower_text(
      "rmir 1\n"
      "input %0 \"x\" : f32[2,6]\n"
      "%1 = reshape(%0) {shape=<2,3,2>} : f32[2,3,2]\n"
      "%2 = permute(%1) {axes=[0,2,1]} : f32[2,2,3]\n"
      "%3 = slice(%2) {axis=2, start=<1>, step=1, stop=<3>} : f32[2,2,2]\n"
      "%4 = exp(%3) : f32[2,2,2]\n"
      "return %4\n");
  REQUIRE(list.steps.size() == 1);
  CHECK(list.steps[0].op == "ewise");
  CHECK(list.steps[0].inputs[0].layout.strides == ir::Ints{6, 1, 2});
  CHECK(list.steps[0].inputs[0].layout.offset == 2);
  CHECK(list.buffers[static_cast<size_t>(list.steps[0].outputs[0].buffer)].kind ==
        BufferKind::kOutput);
}

TEST_CASE("an output that is a view or given twice is copied out") {
  StepList list = lower_text(
      "rmir 1\n"
      "input %0 \"x\" : f32[2,6]\n"
      "%1 = exp(%0) : f32[2,6]\n"
      "%2 = permute(%1) {axes=[1,0]} : f32[6,2]\n"
      "return %1, %1, %2, %0\n");
  int copies = 0;
  for (const auto& s : list.steps) copies += s.op == "copy" ? 1 : 0;
  CHECK(copies == 4);
  CHECK(list.outputs[2].layout.is_contiguous());
}

TEST_CASE("an operator nobody knows is refused with its name") {
  CHECK_THROWS_WITH_AS(lower_text("rmir 1\ninput %0 \"x\" : f32[2]\n%1 = frobnicate(%0) : f32[2]\n"
                                  "return %1\n"),
                       doctest::Contains("frobnicate"), Error);
}

TEST_CASE("sizes among the attributes reach kernels as integers") {
  select::Operand x{true, ir::contiguous(ir::DType::kF32, {4}), false};
  select::Problem problem("aten.x", {x}, {x}, {{"sym_args", ir::Dims{4, 7}}});
  REQUIRE(problem.c().num_attrs == 1);
  CHECK(problem.c().attrs[0].kind == RM_ATTR_INTS);
  CHECK(problem.c().attrs[0].ints[1] == 7);
  CHECK_THROWS_AS(select::Problem("aten.x", {x}, {x}, {{"n", ir::Dims{ir::Dim::symbol("s0")}}}),
                  Error);
}

TEST_CASE("problems differ when an operand moves from the inputs to the outputs") {
  select::Operand x{true, ir::contiguous(ir::DType::kF32, {4}), false};
  select::Problem a("aten.x", {x, x}, {x}, {}), b("aten.x", {x}, {x, x}, {});
  CHECK(a.key() != b.key());
}

TEST_CASE("kernels never see the values of a constant before they run") {
  select::Operand x{true, ir::contiguous(ir::DType::kF32, {4}), true};
  select::Problem problem("gemm", {x}, {x}, {});
  CHECK(problem.c().constant_inputs == 1);
  CHECK(problem.input(0).data == nullptr);
}

TEST_CASE("a row whose cost is not a number is chosen last") {
  auto row = [](const char* name, double (*cost)(const rm_problem*, const rm_device_info*,
                                                 uint32_t)) {
    rm_kernel k{};
    k.struct_size = sizeof k;
    k.op = {"copy", 4};
    k.name = {name, std::string(name).size()};
    k.num_configs = 1;
    k.cost_ns = cost;
    return k;
  };
  rm_kernel rows[] = {
      row("odd", [](const rm_problem*, const rm_device_info*, uint32_t) { return std::nan(""); }),
      row("known", [](const rm_problem*, const rm_device_info*, uint32_t) { return 50.0; })};
  select::KernelTable table;
  for (const auto& r : rows) table.add("fake", &r, nullptr);
  select::Operand x{true, ir::contiguous(ir::DType::kF32, {4}), false};
  CHECK(table.select(select::Problem("copy", {x}, {x}, {})).row->name() == "known");
}

TEST_CASE("selection keeps the reasons and prefers the cheaper row") {
  auto yes = [](const rm_problem*, const rm_device_info*, rm_str*) { return 1; };
  auto no = [](const rm_problem*, const rm_device_info*, rm_str* why) {
    *why = {"too big", 7};
    return 0;
  };
  auto row = [](const char* name, auto supports, double (*cost)(const rm_problem*,
                                                                const rm_device_info*, uint32_t)) {
    rm_kernel k{};
    k.struct_size = sizeof k;
    k.op = {"copy", 4};
    k.name = {name, std::string(name).size()};
    k.num_configs = 1;
    k.supports = supports;
    k.cost_ns = cost;
    return k;
  };
  rm_kernel rows[] = {
      row("refuses", no, nullptr),
      row("slow", yes, [](const rm_problem*, const rm_device_info*, uint32_t) { return 50.0; }),
      row("fast", yes, [](const rm_problem*, const rm_device_info*, uint32_t) { return 5.0; })};
  select::KernelTable table;
  for (const auto& r : rows) table.add("fake", &r, nullptr);
  select::Operand x{true, ir::contiguous(ir::DType::kF32, {4}), false};
  select::Problem problem("copy", {x}, {x}, {});
  auto choice = table.select(problem);
  CHECK(choice.row->name() == "fast");
  CHECK(choice.reasons[0] == "fake/refuses: no, too big");
  CHECK(table.select(problem, "slow").row->name() == "slow");
  CHECK(table.select(problem, {}, {{choice.row, "refused"}}).row->name() == "slow");
  select::Problem other("softmax", {x}, {x}, {});
  CHECK_THROWS_AS(table.select(other), Error);
}
