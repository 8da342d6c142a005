// Small steps that follow each other become one step: programs give what they give step by step. The
// kernel of the test is the self-check's reference.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "backend/registry.hpp"
#include "engine_support.hpp"
#include "ops/evaluate.hpp"
#include "rm/plugin.hpp"
#include "selfcheck/fused.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

size_t most_parts = 1000;  // what the row is asked for; tests change it


int takes(const rm_problem* p, const rm_device_info*, rm_str*) {
  for (size_t i = 0; i < p->num_attrs; ++i) {
    if (p->attrs[i].name.size == 7 && p->attrs[i].count > most_parts) return 0;  // program
  }
  return 1;
}

rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t, rm_kernel_state** out) {
  auto* s = new selfcheck::Shape{"small_steps", {}, {}, {}};
  const auto operand = [](const rm_tensor* t) {
    ir::Layout layout;
    ir::from_dlpack(t->dtype, &layout.dtype);
    layout.dims.assign(t->shape, t->shape + t->ndim), layout.strides.assign(t->strides, t->strides + t->ndim);
    return select::Operand{true, layout, false};
  };
  for (size_t i = 0; i < p->num_inputs; ++i) s->inputs.push_back(operand(p->inputs[i]));
  for (size_t i = 0; i < p->num_outputs; ++i) s->outputs.push_back(operand(p->outputs[i]));
  for (size_t i = 0; i < p->num_attrs; ++i) {
    const rm_attr& a = p->attrs[i];
    const std::string name(a.name.data, a.name.size);
    if (a.kind == RM_ATTR_INTS) s->attrs[name] = ir::Ints(a.ints, a.ints + a.count);
    if (a.kind == RM_ATTR_FLOATS) s->attrs[name] = std::vector<double>(a.floats, a.floats + a.count);
  }
  *out = reinterpret_cast<rm_kernel_state*>(s);
  return nullptr;
}
void release(rm_kernel_state* s) { delete reinterpret_cast<selfcheck::Shape*>(s); }
double cost(const rm_problem*, const rm_device_info*, uint32_t) { return 1; }

selfcheck::Filled filled(const ir::Layout& layout, const void* from) {
  selfcheck::Filled out;
  ir::TensorType type{layout.dtype, {}};
  for (int64_t d : layout.dims) type.dims.emplace_back(d);
  out.values = ops::zeros(type);
  out.offsets = ops::strided_offsets(layout.dims, layout.strides);
  const size_t item = ir::size_bytes(layout.dtype);
  for (size_t e = 0; e < out.offsets.size(); ++e) {
    const auto* source = static_cast<const char*>(from) + out.offsets[e] * static_cast<int64_t>(item);
    std::memcpy(out.values.at(static_cast<int64_t>(e)), source, item);
  }
  return out;
}

rm_status* run(const rm_launch* l) {
  const auto& s = *reinterpret_cast<const selfcheck::Shape*>(l->state);
  std::vector<selfcheck::Filled> inputs, before;
  for (size_t i = 0; i < s.inputs.size(); ++i) inputs.push_back(filled(s.inputs[i].layout, l->inputs[i]));
  for (size_t i = 0; i < s.outputs.size(); ++i) before.push_back(filled(s.outputs[i].layout, l->outputs[i]));
  for (const selfcheck::Part& part : selfcheck::expected_fused(s, inputs, before)) {
    const size_t item = ir::size_bytes(part.values.type.dtype);
    for (size_t e = 0; e < before[part.output].offsets.size(); ++e) {
      std::memcpy(static_cast<char*>(l->outputs[part.output]) + before[part.output].offsets[e] * static_cast<int64_t>(item),
                  part.values.at(static_cast<int64_t>(e)), item);
    }
  }
  return nullptr;
}

std::shared_ptr<const select::KernelTable> fusing_kernels(bool inlines = false) {
  auto table = std::make_shared<select::KernelTable>();
  Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
  static rm_kernel& row = *[] {
    auto* k = new rm_kernel{};
    k->struct_size = sizeof *k, k->op = k->name = plugin::str("small_steps"), k->digest = plugin::str("1");
    k->num_configs = 1, k->supports = takes, k->cost_ns = cost, k->prepare = prepare;
    k->release = release, k->launch = run;
    return k;
  }();
  for (const rm_kernel& k : cpu.kernels()) table->add("cpu", &k, &cpu.get_device_info(0));
  // Of a device where a launch costs something element-wise steps take in those they read.
  table->add("test", &row, inlines ? &cpu_that_launches() : &cpu.get_device_info(0));
  return table;
}

/// The mean loss of class numbers, some of them ignored, and its slope, between two products; and a cast
/// that the step behind the products reads.
std::string loss_program(int rows, int classes) {
  const std::string r = std::to_string(rows), c = std::to_string(classes), rc = "f32[" + r + "," + c + "]";
  std::string numbers;
  for (int i = 0; i < classes; ++i) {
    const char* digits = "0123456789abcdef";
    numbers += std::string{digits[i / 16], digits[i % 16]} + "00000000000000";
  }
  return "rmir 1\ninput %0 \"x\" : f32[" + r + ",32]\ninput %1 \"w\" : f32[" + c + ",32]\ninput %2 \"y\" : i64[" + r +
         "]\ninput %3 \"h\" : f64[1,8]\nliteral %4 : i64[] = 9cffffffffffffff\n"
         "literal %5 : i64[] = 0000000000000000\nliteral %6 : f32[] = 0000803f\nliteral %7 : i64[1," + c + "] = " + numbers +
         "\n%8 = gemm(%0, %1, _, _) {activation=\"none\", trans_b=1} : " + rc +
         "\n%9 = softmax(%8) {axis=1, log=1} : " + rc + "\n%10 = reshape(%2) {shape=<" + r + ",1>} : i64[" + r +
         ",1]\n%11 = ne(%10, %4) : bool[" + r + ",1]\n%12 = where(%11, %10, %5) : i64[" + r +
         ",1]\n%13 = gather(%9, %12) {axis=1} : f32[" + r + ",1]\n"
         "%14 = ewise(%11, %13) {code=[2,0,1,-1,-1,0,0,0,-1,-1,70,0,0,2,3], imm=f[0x0p+0]} : f32[" + r +
         ",1]\n%15 = reduce(%14) {axes=[0,1], keepdim=0, kind=\"sum\"} : f32[]\n%16 = cast(%11) : f32[" + r +
         ",1]\n%17 = reduce(%16) {axes=[0,1], keepdim=0, kind=\"sum\"} : f32[]\n%18 = div(%15, %17) : f32[]\n"
         "%19 = div(%6, %17) : f32[]\n%20 = reshape(%19) {shape=<1,1>} : f32[1,1]\n"
         "%21 = ewise(%11, %20) {code=[0,0,0,-1,-1,70,0,0,1,2,2,0,3,-1,-1], imm=f[0x0p+0]} : f32[" + r +
         ",1]\n%22 = ewise(%7, %12, %21, %9) {code=[49,2,0,1,-1,0,0,0,-1,-1,70,0,4,2,5,4,0,3,-1,-1,42,0,7,2,-1,41,0,6,8,-1], "
         "imm=f[0x0p+0]} : " + rc +
         "\n%23 = gemm(%22, %1, _, _) {activation=\"none\", trans_b=0} : f32[" + r +
         ",32]\n%24 = cast(%3) : f32[1,8]\n%25 = slice(%24) {axis=1, start=<2>, step=1, stop=<3>} : f32[1,1]\n"
         "%26 = mul(%23, %25) : f32[" + r + ",32]\nreturn %18, %26, %9\n";
}

std::pair<std::vector<HostTensor>, std::map<std::string, int64_t>> results_of(
    const Case& c, const std::shared_ptr<const select::KernelTable>& kernels,
    const std::vector<HostTensor>& inputs) {
  Program program(c.graph, kernels);
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  outputs.tensors.resize(64);
  program.run(views, outputs);
  return {outputs.tensors, program.report().kernels};
}

int64_t count(const std::map<std::string, int64_t>& kernels, const std::string& name) {
  const auto it = kernels.find(name);
  return it == kernels.end() ? 0 : it->second;
}

}  // namespace

TEST_CASE("a loss, its slope and a cast for later steps are one step where they are small") {
  std::mt19937 rng(11);
  for (const auto& [rows, classes, steps] : {std::tuple(24, 10, 1), std::tuple(1, 2, 1), std::tuple(64, 32, 1),
                                             std::tuple(600, 10, 2)}) {
    CAPTURE(rows);
    const Case c = load(loss_program(rows, classes), rng);
    std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {rows, 32}),
                                   random_tensor(rng, ir::DType::kF32, {classes, 32})};
    std::vector<int64_t> ids;
    for (int i = 0; i < rows; ++i) ids.push_back(i % 5 == 4 ? -100 : i % classes);
    inputs.push_back(ops::from_ints({ir::DType::kI64, {rows}}, ids));
    inputs.push_back(random_tensor(rng, ir::DType::kF64, {1, 8}));
    most_parts = 1000;
    const auto [plain, alone] = results_of(c, cpu_kernels(), inputs);
    const auto [fused, kernels] = results_of(c, fusing_kernels(), inputs);
    for (size_t i = 0; i < 3; ++i) CHECK(max_difference(plain[i], fused[i]) < 1e-4);
    CHECK(count(kernels, "test/small_steps") == steps);
    int64_t launches = 0;
    for (const auto& [name, n] : kernels) launches += n;
    if (rows != 600) CHECK(launches == 4);  // two products, what lies between them, the multiplication
    // Programs that took in what they read have more operands, and are still parts of the step.
    const auto [taken, fewer] = results_of(c, fusing_kernels(true), inputs);
    for (size_t i = 0; i < 3; ++i) CHECK(max_difference(plain[i], taken[i]) < 1e-4);
    if (rows != 600) CHECK(fewer == kernels);
    most_parts = 3;  // what no kernel takes stays as it was
    const auto [same, left] = results_of(c, fusing_kernels(), inputs);
    for (size_t i = 0; i < 3; ++i) CHECK(max_difference(plain[i], same[i]) == 0);
    CHECK(left == alone);
  }
  most_parts = 1000;
}
