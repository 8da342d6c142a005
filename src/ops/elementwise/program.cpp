// ewise: a short register program over broadcast operands (docs/operators.md, "ewise programs").
#include "ir/scalar.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

void check_program(const Node& node) {
  const auto& code = node.ints("code");
  const auto& imm = node.floats("imm");
  if (code.empty() || code.size() % kEwiseFields != 0) {
    fail(node, "instructions of 5 numbers", std::to_string(code.size()) + " numbers");
  }
  auto defined = static_cast<int64_t>(node.operands.size());
  for (size_t i = 0; i < code.size(); i += kEwiseFields, ++defined) {
    const EwiseOpcode* row = find_opcode(code[i]);
    if (row == nullptr) fail(node, "a known opcode", std::to_string(code[i]));
    if (code[i + 1] < 0 || code[i + 1] > 2) fail(node, "a class 0..2", std::to_string(code[i + 1]));
    if (row->opcode == ewise::kConst) {
      if (code[i + 2] < 0 || code[i + 2] >= static_cast<int64_t>(imm.size())) {
        fail(node, "an immediate in range", std::to_string(code[i + 2]));
      }
      continue;
    }
    for (int k = 0; k < row->arity; ++k) {
      int64_t reg = code[i + 2 + static_cast<size_t>(k)];
      if (reg < 0 || reg >= defined) fail(node, "a register defined above", std::to_string(reg));
    }
  }
}

Types infer_ewise(const Graph& graph, const Node& node) {
  check_program(node);
  ir::Dims dims;
  for (size_t i = 0; i < node.operands.size(); ++i) {
    dims = broadcast(node, dims, operand_type(graph, node, i).dims);
  }
  const TensorType& out = result_type(graph, node);
  if (node.operands.empty()) dims = out.dims;
  return {{out.dtype, dims}};
}

Cost ewise_cost(const Graph& graph, const Node& node) {
  auto instructions = static_cast<double>(node.ints("code").size() / kEwiseFields);
  return {instructions * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

// A register in every form an instruction may want it in.
struct Register {
  double f = 0;
  int64_t n = 0;
  bool is_int = false;

  static Register of(double v) { return {v, 0, false}; }
  static Register of_int(int64_t v) { return {static_cast<double>(v), v, true}; }
  double as_float() const { return f; }
  int64_t as_int() const {
    if (is_int) return n;
    int64_t out = 0;
    ir::store_element(ir::DType::kI64, &out, f);
    return out;
  }
};

Register step(const int64_t* in, const std::vector<Register>& regs,
              const std::vector<double>& imm) {
  auto opcode = static_cast<int>(in[0]);
  auto cls = static_cast<EwiseClass>(in[1]);
  auto read = [&](int k) { return in[k] >= 0 ? regs[static_cast<size_t>(in[k])] : Register{}; };
  if (opcode == ewise::kConst) {
    double v = imm[static_cast<size_t>(in[2])];
    return cls == EwiseClass::kInt ? Register::of_int(Register::of(v).as_int()) : Register::of(v);
  }
  Register a = read(2), b = read(3), c = read(4);
  const bool logical = find_opcode(in[0])->is_logical;
  if (cls == EwiseClass::kInt) {
    // `where` tests its condition as it is: 0.5 is true.
    int64_t first =
        opcode == ewise::kWhere ? static_cast<int64_t>(a.is_int ? a.n != 0 : a.f != 0) : a.as_int();
    return Register::of_int(apply_int(opcode, first, b.as_int(), c.as_int()));
  }
  auto narrow = [&](double v) {
    return cls == EwiseClass::kF32 ? static_cast<double>(static_cast<float>(v)) : v;
  };
  double v = apply_float(opcode, narrow(a.as_float()), narrow(b.as_float()), narrow(c.as_float()));
  return logical ? Register::of_int(v != 0 ? 1 : 0) : Register::of(narrow(v));
}

std::vector<HostTensor> reference_ewise(const Node& node, const HostOperands& in,
                                        const Types& out) {
  const auto& code = node.ints("code");
  const auto& imm = node.floats("imm");
  std::vector<std::vector<int64_t>> at;
  for (const HostTensor* x : in) at.push_back(broadcast_offsets(x->type.dims, out[0].dims));
  HostTensor y = zeros(out[0]);
  std::vector<Register> regs;
  for (int64_t i = 0; i < y.size(); ++i) {
    regs.clear();
    for (size_t k = 0; k < in.size(); ++k) {
      const char* p = in[k]->at(at[k][static_cast<size_t>(i)]);
      ir::DType dtype = in[k]->type.dtype;
      regs.push_back(ir::is_floating(dtype)
                         ? Register::of(ir::load_element(dtype, p))
                         : Register{ir::load_element(dtype, p), ir::load_int(dtype, p), true});
    }
    for (size_t n = 0; n < code.size(); n += kEwiseFields) {
      regs.push_back(step(&code[n], regs, imm));
    }
    const Register& last = regs.back();
    if (last.is_int && !ir::is_floating(out[0].dtype)) {
      ir::store_int(out[0].dtype, y.at(i), last.n);
    } else {
      ir::store_element(out[0].dtype, y.at(i), last.f);
    }
  }
  return {y};
}

}  // namespace

extern const OpDef kEwise{"ewise",     0,          kAnyNumber,     kElementwise,
                          infer_ewise, ewise_cost, reference_ewise};

}  // namespace rm::ops
