// The table of small steps: reads the program, checks that it stays inside its values, and launches.
#include <optional>

#include "_shim/alias_shim.hpp"
#include "small_steps/api.hpp"
#include "small_steps/kernels/small_steps_any.cuh"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kMostElements = 2048;  // of a value

std::optional<DType> dtype_of(std::int64_t code) {
  // DLPack's code (signed, unsigned, float, bfloat, bool) and bits.
  constexpr std::pair<std::int64_t, DType> kTypes[] = {
      {0x220, DType::f32}, {0x240, DType::f64}, {0x410, DType::bf16}, {0x210, DType::f16},
      {0x040, DType::i64}, {0x020, DType::i32}, {0x010, DType::i16},  {0x008, DType::i8},
      {0x108, DType::u8},  {0x608, DType::boolean}};
  for (const auto& [number, dtype] : kTypes) {
    if (number == code) return dtype;
  }
  return std::nullopt;
}

/// Reads a program into the kernel's arguments; false where it is none, or leaves its values.
class Reader {
 public:
  Reader(const SmallSteps& p, SmallStepsArgs& out) : p_(p), out_(out) {}

  bool run() {
    if (!read_values() || !read_code()) return false;
    while (at_ < p_.program.size()) {
      if (out_.parts == kSmallParts || !read_part(out_.program.part[out_.parts++])) return false;
    }
    return out_.parts > 0 && !failed_;
  }
  std::int64_t memory() const { return memory_; }

 private:
  std::int64_t next() {
    if (at_ < p_.program.size()) return p_.program[at_++];
    failed_ = true;
    return 0;
  }

  bool read_values() {
    const std::int64_t inner = next();
    const auto outer = static_cast<std::int64_t>(p_.inputs.size() + p_.outputs.size());
    if (inner < 0 || outer + inner > kSmallSlots) return false;
    for (const auto* list : {&p_.inputs, &p_.outputs}) {
      for (const Tensor& t : *list) {
        if (numel(t) < 1 || numel(t) > kMostElements || t.rank > kSmallRank) return false;
        elements_[out_.slots] = extent(t);
        out_.dtype[out_.slots] = t.dtype, out_.data[out_.slots++] = t.data;
      }
    }
    for (std::int64_t i = 0; i < inner; ++i) {
      const std::optional<DType> dtype = dtype_of(next());
      const std::int64_t count = next();
      if (!dtype || count < 1 || count > kSmallBytes) return false;
      out_.dtype[out_.slots] = *dtype, out_.offset[out_.slots] = static_cast<int>(memory_);
      elements_[out_.slots++] = count;
      memory_ += ceil_div(count * size_of(*dtype), 16) * 16;
      if (memory_ > kSmallBytes) return false;
    }
    return true;
  }

  static std::int64_t extent(const Tensor& t) {
    std::int64_t last = 0;
    for (int d = 0; d < t.rank; ++d) last += (t.shape[d] - 1) * t.stride[d];
    return last + 1;
  }

  bool read_code() {
    const auto& code = p_.code.code;
    if (code.size() > kSmallCode || p_.code.imm.size() > kSmallCode) return false;
    for (std::size_t i = 0; i < code.size(); ++i) {
      const auto narrow = [](int v) { return static_cast<std::int16_t>(v); };
      out_.program.step[i].step = {narrow(code[i].opcode), narrow(code[i].cls), narrow(code[i].a),
                                   narrow(code[i].b), narrow(code[i].c)};
      const bool values = code[i].cls == 0 && code[i].opcode != kConst && !gives_bool(code[i].opcode);
      out_.program.step[i].direct = values ? 1 : 0;  // unless a part has other operands
    }
    out_.steps = static_cast<int>(code.size());
    std::copy(p_.code.imm.begin(), p_.code.imm.end(), out_.program.imm);
    return true;
  }

  /// `sizes` are those that its strides go with.
  bool read_place(SmallPlace& place, const std::int64_t* sizes, int rank) {
    const std::int64_t slot = next();
    if (slot < 0 || slot >= out_.slots) return false;
    place.slot = static_cast<std::uint8_t>(slot);
    std::int64_t stride[kSmallRank] = {}, low = 0, high = 0;
    if (slot < static_cast<std::int64_t>(p_.inputs.size())) {
      const Tensor& t = p_.inputs[static_cast<std::size_t>(slot)];
      if (t.rank != rank) return false;
      for (int d = 0; d < rank; ++d) {
        if (t.shape[d] < sizes[d]) return false;
        stride[d] = t.stride[d];
      }
    } else {
      low = high = next();
      for (int d = 0; d < rank; ++d) stride[d] = next();
    }
    place.offset = static_cast<std::int32_t>(low);
    for (int d = 0; d < rank; ++d) {
      place.stride[d] = static_cast<std::int32_t>(stride[d]);
      (stride[d] < 0 ? low : high) += stride[d] * (sizes[d] - 1);
    }
    return low >= 0 && high < elements_[slot];
  }

  bool read_part(SmallPart& part) {
    const std::int64_t op = next(), a = next(), b = next(), rank = next();
    if (op < 0 || op > 3 || rank < 0 || rank > kSmallRank) return false;
    part.op = static_cast<SmallOp>(op), part.rank = static_cast<std::uint8_t>(rank);
    part.a = static_cast<std::int32_t>(a), part.b = static_cast<std::int32_t>(b);
    std::int64_t count = 1, sizes[kSmallRank] = {}, other[kSmallRank] = {};
    for (int d = 0; d < rank; ++d) {
      sizes[d] = other[d] = next();
      if (sizes[d] < 1) return false;
      count *= sizes[d];
      part.size[d] = static_cast<std::int32_t>(std::min(sizes[d], kMostElements));
      part.share[d] = 1.0f / static_cast<float>(part.size[d]);
    }
    part.count = static_cast<std::int32_t>(std::min(count, kMostElements + 1));
    const std::int64_t operands = next();
    if (failed_ || count > kMostElements || operands < 0 || operands > kSmallOperands) return false;
    part.operands = static_cast<std::uint8_t>(operands);
    if (part.op == SmallOp::reduce) {
      for (int d = 0; d < rank; ++d) other[d] = (b >> d & 1) ? 1 : sizes[d];
      if (!read_place(part.place[0], other, static_cast<int>(rank))) return false;
    } else if (!read_place(part.place[0], sizes, static_cast<int>(rank))) {
      return false;
    }
    if (part.op == SmallOp::gather) {
      if (a < 0 || a >= rank || b < 1 || operands != 2) return false;
      other[a] = b;
    } else {
      std::copy(sizes, sizes + kSmallRank, other);
    }
    for (int i = 0; i < operands; ++i) {
      const bool looked_into = part.op == SmallOp::gather && i == 0;
      if (!read_place(part.place[1 + i], looked_into ? other : sizes, static_cast<int>(rank))) return false;
    }
    return !failed_ && fits(part);
  }

  bool fits(const SmallPart& part) {
    const auto type = [&](int i) { return out_.dtype[part.place[i].slot]; };
    switch (part.op) {
      case SmallOp::ewise:
        return code_fits(part);
      case SmallOp::reduce:
        return part.operands == 1 && part.a >= 0 && part.a <= 3 && type(0) == type(1) &&
               (type(0) == DType::f32 || type(0) == DType::f64);
      case SmallOp::softmax:
        return part.operands == 1 && part.rank > 0 && type(0) == DType::f32 && type(1) == DType::f32;
      default:
        return type(0) == type(1) && (type(2) == DType::i64 || type(2) == DType::i32);
    }
  }

  bool code_fits(const SmallPart& part) {
    const auto count = static_cast<std::int64_t>(p_.code.code.size());
    if (part.a < 0 || part.b < 1 || part.b > kMaxInstructions || std::int64_t{part.a} + part.b > count) return false;
    int cls[kSmallOperands + kMaxInstructions];  // of registers
    for (int i = 0; i < part.operands; ++i) cls[i] = class_of(out_.dtype[part.place[1 + i].slot]);
    for (int k = 0; k < part.b; ++k) {
      SmallStep& step = out_.program.step[part.a + k];
      const EwiseStep& s = step.step;
      const int most = s.opcode == kConst ? static_cast<int>(p_.code.imm.size()) : part.operands + k;
      if (s.a < 0 || s.a >= most || s.cls < 0 || s.cls > 2) return false;
      if (s.opcode != kConst && (s.b >= most || s.c >= most)) return false;
      for (int r : {s.a, s.b, s.c}) {
        if (s.opcode != kConst && r >= 0 && cls[r] != 0) step.direct = 0;
      }
      cls[part.operands + k] = s.opcode != kConst && gives_bool(s.opcode) ? 2 : s.cls;
    }
    return true;
  }

  /// Of a register with a value of this type.
  static int class_of(DType dtype) {
    const bool single = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
    return single ? 0 : dtype == DType::f64 ? 1 : 2;
  }

  const SmallSteps& p_;
  SmallStepsArgs& out_;
  std::size_t at_ = 0;
  std::int64_t memory_ = 0, elements_[kSmallSlots] = {};
  bool failed_ = false;
};

Status launch_block(const SmallSteps& p, Workspace, Stream stream) {
  SmallStepsArgs args{};
  Reader reader(p, args);
  if (!reader.run()) return invalid("[small_steps] expected a program that was checked, got another");
  return launch_overlapped("small_steps", small_steps_block, 1, kSmallThreads,
                           static_cast<std::size_t>(reader.memory()), stream, args);
}

constexpr KernelRow<SmallSteps> kRows[] = {
    {"small_steps_any", "few elements", [](const SmallSteps&) -> const char* { return nullptr; },
     [](const SmallSteps&) { return 5.0; }, launch_block},
};

}  // namespace

std::span<const KernelRow<SmallSteps>> small_steps_rows() { return kRows; }

Status legal(const SmallSteps& p) {
  SmallStepsArgs args{};
  if (!Reader(p, args).run()) {
    return invalid("[small_steps] expected a program over few elements that stays inside its values");
  }
  std::vector<Operand> results, operands;
  for (const Tensor& t : p.outputs) results.push_back({"a result", &t});
  for (const Tensor& t : p.inputs) operands.push_back({"an operand", &t});
  return check_memory("small_steps", results, operands);
}

Status small_steps(const SmallSteps& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  const KernelRow<SmallSteps>* row = nullptr;
  if (Status s = select_row<SmallSteps>("small_steps", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
