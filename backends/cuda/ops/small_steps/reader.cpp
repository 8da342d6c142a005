#include "small_steps/reader.hpp"

#include "_shim/dispatch_shim.hpp"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kMostElements = 4096;  // of a value

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

std::int64_t extent(const Tensor& t) {
  std::int64_t last = 0;
  for (int d = 0; d < t.rank; ++d) last += (t.shape[d] - 1) * t.stride[d];
  return last + 1;
}

/// Of a register with a value of this type.
std::uint8_t class_of(DType dtype) { return dtype == DType::f64 ? 1 : small_is_real(dtype) ? 0 : 2; }

std::uint64_t bits_of(double value, int cls) {
  if (cls == 0) return std::bit_cast<std::uint32_t>(static_cast<float>(value));
  return cls == 1 ? std::bit_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
}

/// The entry of the kernel's table for an instruction whose operands have these classes.
SmallCode code_of(int opcode, int cls, const std::uint8_t* of) {
  constexpr std::pair<int, SmallCode> kReal[] = {
      {kAdd, SmallCode::add},     {kSub, SmallCode::sub},   {kMul, SmallCode::mul},         {kDiv, SmallCode::div},
      {kNeg, SmallCode::neg},     {kCopy, SmallCode::copy}, {kWhere, SmallCode::where},     {kEq, SmallCode::eq},
      {kNe, SmallCode::ne},       {kLt, SmallCode::lt},     {kLe, SmallCode::le},           {kGt, SmallCode::gt},
      {kGe, SmallCode::ge},       {kExp, SmallCode::exp},   {kLog, SmallCode::log},         {kRelu, SmallCode::relu},
      {kFma, SmallCode::fma},     {kMaximum, SmallCode::maximum}, {kMinimum, SmallCode::minimum},
      {kAnd, SmallCode::both},    {kOr, SmallCode::either}, {kLogicalNot, SmallCode::negated}};
  constexpr std::pair<int, SmallCode> kWhole[] = {
      {kEq, SmallCode::whole_eq}, {kNe, SmallCode::whole_ne},   {kLt, SmallCode::whole_lt},
      {kLe, SmallCode::whole_le}, {kGt, SmallCode::whole_gt},   {kGe, SmallCode::whole_ge},
      {kAdd, SmallCode::whole_add}, {kSub, SmallCode::whole_sub}, {kCopy, SmallCode::copy}};
  if (opcode == kWhere && of[0] == 0 && of[1] == cls && of[2] == cls) return SmallCode::where;  // bits, of any class
  const auto all = [&](int wanted) { return cls == wanted && of[0] == wanted && of[1] == wanted && of[2] == wanted; };
  if (all(0)) {
    for (const auto& [op, code] : kReal) {
      if (op == opcode) return code;
    }
  }
  if (all(2)) {
    for (const auto& [op, code] : kWhole) {
      if (op == opcode) return code;
    }
  }
  return SmallCode::other;
}

/// The common distance of neighbours in the order of the elements that `counts` says to count; none: 0.
std::optional<std::int32_t> step_of(const std::int32_t* stride, const std::int32_t* size, int counts) {
  std::int32_t inner = 1, step = 0;
  for (int d = kSmallRank - 1; d >= 0; --d) {
    if (!(counts >> d & 1) || size[d] == 1) continue;
    if (inner == 1) step = stride[d];
    if (stride[d] != step * inner) return std::nullopt;
    inner *= size[d];
  }
  return step;
}

constexpr int kAll = (1 << kSmallRank) - 1;

}  // namespace

bool SmallReader::run() {
  if (!read_values() || p_.code.code.size() > kSmallCode || p_.code.imm.size() > kSmallCode) return false;
  while (at_ < p_.program.size()) {
    if (out_.parts == kSmallParts || !read_part()) return false;
    ++out_.parts;
  }
  if (out_.parts == 0 || failed_) return false;
  place_barriers();
  split_parts();
  return true;
}

bool SmallReader::read_values() {
  const std::int64_t inner = next();
  const auto outer = static_cast<std::int64_t>(p_.inputs.size() + p_.outputs.size());
  if (inner < 0 || outer + inner > kSmallSlots) return false;
  for (const auto* list : {&p_.inputs, &p_.outputs}) {
    for (const Tensor& t : *list) {
      if (numel(t) < 1 || numel(t) > kMostElements || t.rank > kSmallRank) return false;
      slot_[slots_++] = {t.dtype, static_cast<char*>(t.data), 0, extent(t)};
    }
  }
  for (std::int64_t i = 0; i < inner; ++i) {
    const std::optional<DType> dtype = dtype_of(next());
    const std::int64_t count = next();
    if (!dtype || count < 1 || count > kSmallBytes) return false;
    slot_[slots_++] = {*dtype, nullptr, memory_, count};
    memory_ += ceil_div(count * size_of(*dtype), 16) * 16;
    if (memory_ > kSmallBytes) return false;
  }
  return true;
}

bool SmallReader::read_part() {
  SmallPart& part = out_.program.part[out_.parts];
  const std::int64_t op = next(), a = next(), b = next(), rank = next();
  if (op < 0 || op > 3 || rank < 0 || rank > kSmallRank) return false;
  part.head.op = static_cast<SmallOp>(op);
  rank_ = static_cast<int>(rank);
  std::int64_t count = 1, sizes[kSmallRank];
  for (int d = 0; d < kSmallRank; ++d) {  // at the end of the kernel's dimensions
    const std::int64_t size = d < kSmallRank - rank_ ? 1 : next();
    if (size < 1 || size > kMostElements) return false;
    sizes[d] = size, count *= size;
    part.size[d] = static_cast<std::int32_t>(size);
    part.share[d] = 1.0f / static_cast<float>(size);
  }
  part.head.count = static_cast<std::uint16_t>(std::min(count, kMostElements + 1));
  const std::int64_t operands = next();
  if (failed_ || count > kMostElements || operands < 0 || operands > kSmallOperands) return false;
  part.head.operands = static_cast<std::uint8_t>(operands);
  return read_places(part, sizes, a, b) && fits(part, a, b);
}

bool SmallReader::read_places(SmallPart& part, const std::int64_t* sizes, std::int64_t a, std::int64_t b) {
  const int shift = kSmallRank - rank_;
  std::int64_t of_result[kSmallRank], looked_into[kSmallRank];
  std::copy(sizes, sizes + kSmallRank, of_result);
  std::copy(sizes, sizes + kSmallRank, looked_into);
  if (part.head.op == SmallOp::reduce) {
    for (int d = 0; d < rank_; ++d) {
      if (b >> d & 1) of_result[d + shift] = 1;
    }
  }
  const bool gathers = part.head.op == SmallOp::gather;
  if (gathers) {
    if (a < 0 || a >= rank_ || b < 1 || b > kMostElements || part.head.operands != 2) return false;
    looked_into[a + shift] = b;
  }
  for (int i = 0; i <= part.head.operands; ++i) {
    if (!read_place(part, i, i == 0 ? of_result : i == 1 && gathers ? looked_into : sizes)) return false;
    part.head.uneven |= part.place[i].even == 0 ? 1 : 0;
  }
  return !failed_;
}

/// `sizes` are those that its strides go with.
bool SmallReader::read_place(SmallPart& part, int number, const std::int64_t* sizes) {
  const std::int64_t slot = next();
  if (slot < 0 || slot >= slots_) return false;
  const Slot& in = slot_[slot];
  const int shift = kSmallRank - rank_;
  std::int64_t stride[kSmallRank] = {}, low = 0, high = 0;
  if (slot < static_cast<std::int64_t>(p_.inputs.size())) {
    const Tensor& t = p_.inputs[static_cast<std::size_t>(slot)];
    if (t.rank != rank_) return false;
    for (int d = 0; d < rank_; ++d) {
      if (t.shape[d] < sizes[d + shift]) return false;
      stride[d + shift] = t.stride[d];
    }
  } else {
    low = high = next();
    for (int d = 0; d < rank_; ++d) stride[d + shift] = next();
  }
  SmallPlace& place = part.place[number];
  const std::int64_t offset = low;
  for (int d = 0; d < kSmallRank; ++d) {
    if (stride[d] < -kMostElements * kMostElements || stride[d] > kMostElements * kMostElements) {
      if (sizes[d] > 1) return false;
      stride[d] = 0;
    }
    place.stride[d] = static_cast<std::int32_t>(stride[d]);
    (stride[d] < 0 ? low : high) += stride[d] * (sizes[d] - 1);
  }
  if (low < 0 || high >= in.elements) return false;
  const std::optional<std::int32_t> step = step_of(place.stride, part.size, kAll);
  place.even = step ? 1 : 0, place.step = step.value_or(0);
  place.dtype = in.dtype, place.inner = in.data == nullptr ? 1 : 0;
  const std::int64_t bytes = offset * size_of(in.dtype);
  place.data = in.data != nullptr ? in.data + bytes : reinterpret_cast<char*>(in.place + bytes);
  seat_[out_.parts][number] = {static_cast<int>(slot), offset};
  return true;
}

bool SmallReader::fits(SmallPart& part, std::int64_t a, std::int64_t b) {
  const auto type = [&](int i) { return part.place[i].dtype; };
  SmallHead& h = part.head;
  switch (h.op) {
    case SmallOp::ewise:
      return read_code(part, a, b);
    case SmallOp::reduce:
      if (h.operands != 1 || a < 0 || a > 3 || type(0) != type(1) || b < 0 || b >> rank_ != 0) return false;
      if (type(0) != DType::f32 && type(0) != DType::f64) return false;
      h.kind = static_cast<std::uint8_t>(a);
      read_reduction(part, static_cast<int>(b) << (kSmallRank - rank_));
      return true;
    case SmallOp::softmax:
      if (h.operands != 1 || rank_ == 0 || type(0) != DType::f32 || type(1) != DType::f32) return false;
      h.kind = a != 0 ? 1 : 0;
      h.count = static_cast<std::uint16_t>(h.count / part.size[kSmallRank - 1]);
      return true;
    default:
      if (type(0) != type(1) || (type(2) != DType::i64 && type(2) != DType::i32)) return false;
      h.cls = class_of(type(0)), h.first = static_cast<std::int32_t>(b);
      part.axes = static_cast<std::int32_t>(a) + kSmallRank - rank_;
      return true;
  }
}

void SmallReader::read_reduction(SmallPart& part, int axes) {
  part.axes = axes;
  int reduced = 1;
  for (int d = 0; d < kSmallRank; ++d) {
    if (axes >> d & 1) reduced *= part.size[d];
  }
  const auto from = step_of(part.place[1].stride, part.size, kAll & ~axes);
  const auto to = step_of(part.place[0].stride, part.size, kAll & ~axes);
  const auto along = step_of(part.place[1].stride, part.size, axes);
  part.head.uneven = from && to && along ? 0 : 1;
  part.head.first = reduced;
  part.head.count = static_cast<std::uint16_t>(part.head.count / reduced);
  part.from = from.value_or(0), part.to = to.value_or(0), part.along = along.value_or(0);
}

/// The part's instructions, with the classes of what they read.
bool SmallReader::read_code(SmallPart& part, std::int64_t first, std::int64_t count) {
  const auto all = static_cast<std::int64_t>(p_.code.code.size());
  if (first < 0 || count < 1 || count > kMaxInstructions || first + count > all) return false;
  if (out_.steps + count > kSmallCode) return false;
  const int operands = part.head.operands;
  std::uint8_t cls[kSmallOperands + kMaxInstructions] = {};  // of registers
  for (int i = 0; i < operands; ++i) cls[i] = class_of(part.place[1 + i].dtype);
  for (int k = 0; k < count; ++k) {
    const EwiseInstruction& from = p_.code.code[static_cast<std::size_t>(first + k)];
    if (!read_step(from, operands + k, cls, out_.program.step[out_.steps + k])) return false;
  }
  part.head.first = out_.steps, part.head.steps = static_cast<std::uint8_t>(count);
  part.head.cls = cls[operands + count - 1];
  out_.steps += static_cast<int>(count);
  return true;
}

/// An instruction behind `registers` of these classes.
bool SmallReader::read_step(const EwiseInstruction& from, int registers, std::uint8_t* cls, SmallStep& step) {
  const bool constant = from.opcode == kConst;
  const int most = constant ? static_cast<int>(p_.code.imm.size()) : registers;
  if (from.a < 0 || from.a >= most || from.cls < 0 || from.cls > 2) return false;
  step.cls = static_cast<std::uint8_t>(from.cls);
  cls[registers] = step.cls;
  if (constant) {
    step.code = SmallCode::constant;
    step.bits = bits_of(p_.code.imm[static_cast<std::size_t>(from.a)], from.cls);
    return true;
  }
  if (from.b >= most || from.c >= most) return false;
  const int reads[] = {from.a, from.b < 0 ? from.a : from.b, from.c < 0 ? from.a : from.c};
  for (int i = 0; i < 3; ++i) step.of[i] = cls[reads[i]];
  step.a = static_cast<std::uint8_t>(reads[0]), step.b = static_cast<std::uint8_t>(reads[1]);
  step.c = static_cast<std::uint8_t>(reads[2]);
  step.code = code_of(from.opcode, from.cls, step.of);
  step.bits = static_cast<std::uint64_t>(from.opcode);
  if (small_gives_bool(from.opcode, from.cls)) cls[registers] = 0;
  return true;
}

/// A part whose threads read only what they wrote themselves needs no barrier: element-wise parts over
/// the same elements do, and what is one number belongs to the first of its threads. Such parts belong to
/// the same warps. What lies in memory is told apart by its addresses, since operands may share it.
void SmallReader::place_barriers() {
  int writer[kSmallSlots];  // of inner values since the last barrier; -1: none
  std::fill(writer, writer + kSmallSlots, -1);
  std::vector<Range> read, written;  // in memory, since the last barrier
  int first = 0;                     // of the parts since then
  for (int s = 0; s < out_.parts; ++s) {
    SmallPart& part = out_.program.part[s];
    const bool stores = part.place[0].inner == 0;
    bool meets = stores && (overlaps(read, range_of(s, 0)) || overlaps(written, range_of(s, 0)));
    for (int i = 1; i <= part.head.operands && !meets; ++i) {
      const int w = writer[seat_[s][i].slot];
      meets = part.place[i].inner == 0 ? overlaps(written, range_of(s, i)) : w >= 0 && !keeps_to_itself(w, s, i);
    }
    if (meets) {
      share_out(first, s);
      std::fill(writer, writer + kSmallSlots, -1), read.clear(), written.clear();
      first = s;
    }
    part.head.meet = meets ? 1 : 0;
    kin_[s] = s;
    for (int i = 1; i <= part.head.operands; ++i) {
      const int w = part.place[i].inner == 0 ? -1 : writer[seat_[s][i].slot];
      if (part.place[i].inner == 0) read.push_back(range_of(s, i));
      if (w < 0) continue;
      const int old = kin_[w];  // copies: replace() changes what it looks at
      std::replace(kin_ + first, kin_ + s, old, s);
    }
    if (stores) written.push_back(range_of(s, 0));
    if (!stores) writer[seat_[s][0].slot] = s;
  }
  share_out(first, out_.parts);
}

/// Warps of the parts [first, last), which no barrier parts. Small ones get warps of their own as far
/// as there are any, beside large ones the block's first four.
void SmallReader::share_out(int first, int last) {
  constexpr int kAllWarps = kSmallThreads / 32, kBeside = 4;
  const auto wanted = [&](int s) {
    const SmallHead& h = out_.program.part[s].head;
    const int each = h.op == SmallOp::ewise || h.op == SmallOp::gather ? 32 : 1;
    return h.op == SmallOp::softmax ? kAllWarps : std::min<int>(kAllWarps, static_cast<int>(ceil_div(h.count, each)));
  };
  bool small = false, large = false;
  for (int s = first; s < last; ++s) (wanted(s) <= kBeside ? small : large) = true;
  int next = 0;
  for (int s = first; s < last; ++s) {
    SmallHead& h = out_.program.part[s].head;
    const int kin = static_cast<int>(std::find(kin_ + first, kin_ + s, kin_[s]) - kin_);
    const int warps = wanted(s);
    if (kin < s) {  // as the first of those that read what they wrote themselves
      h.warp = out_.program.part[kin].head.warp, h.warps = out_.program.part[kin].head.warps;
    } else if (h.op == SmallOp::softmax) {
      h.warp = 0, h.warps = kAllWarps;
    } else if (large && warps > kBeside) {
      h.warp = small ? kBeside : 0;
      h.warps = static_cast<std::uint8_t>(std::min<int>(warps, kAllWarps - h.warp));
    } else {
      const int most = large ? kBeside : kAllWarps;
      if (next + warps > most) next = 0;
      h.warp = static_cast<std::uint8_t>(next), h.warps = static_cast<std::uint8_t>(warps);
      next += warps;
    }
  }
}

/// Parts of more elements than they have threads, such as masks of long caches, whose elements several
/// blocks share: a thread makes and reads the same elements in all of them, and blocks do not wait for
/// each other.
void SmallReader::split_parts() {
  const auto threads = [&](int s) { return out_.program.part[s].head.warps * 32; };
  for (int s = 0; s < out_.parts; ++s) {
    SmallHead& h = out_.program.part[s].head;
    h.split = h.op == SmallOp::ewise && h.count > threads(s) && stands_alone(s) ? 1 : 0;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (int s = 0; s < out_.parts; ++s) {
      SmallHead& h = out_.program.part[s].head;
      if (h.split == 0 || goes_with_split_parts(s)) continue;
      h.split = 0, changed = true;
    }
  }
  for (int s = 0; s < out_.parts; ++s) {
    const SmallHead& h = out_.program.part[s].head;
    if (h.split == 0) continue;
    const auto wanted = static_cast<int>(ceil_div(h.count, threads(s)));
    blocks_ = std::max(blocks_, std::min(kSmallBlocks, wanted));
  }
}

/// Whether nothing that the part reads or writes in memory is written by another part, and no other part
/// reads what it writes there.
bool SmallReader::stands_alone(int part) const {
  const auto meets = [&](const Range& a, const Range& b) { return a.begin < b.end && b.begin < a.end; };
  for (int i = 0; i <= out_.program.part[part].head.operands; ++i) {
    if (out_.program.part[part].place[i].inner != 0) continue;
    const Range mine = range_of(part, i);
    for (int s = 0; s < out_.parts; ++s) {
      const SmallPart& other = out_.program.part[s];
      for (int k = 0; k <= other.head.operands; ++k) {
        if (other.place[k].inner != 0 || (k != 0 && i != 0) || (s == part && k == i)) continue;
        if (meets(mine, range_of(s, k))) return false;
      }
    }
  }
  return true;
}

/// Whether the inner values that the part reads and writes are those of parts that are split, too, and
/// belong to the same threads.
bool SmallReader::goes_with_split_parts(int part) const {
  const auto alike = [&](int writer, int reader, int operand) {
    const SmallHead &w = out_.program.part[writer].head, &r = out_.program.part[reader].head;
    return w.split != 0 && r.split != 0 && w.warp == r.warp && w.warps == r.warps && keeps_to_itself(writer, reader, operand);
  };
  const auto writes = [&](int s, int slot) { return out_.program.part[s].place[0].inner != 0 && seat_[s][0].slot == slot; };
  const SmallPart& mine = out_.program.part[part];
  for (int s = 0; s < out_.parts; ++s) {
    const SmallPart& other = out_.program.part[s];
    if (mine.place[0].inner != 0 && s != part && writes(s, seat_[part][0].slot)) return false;
    for (int i = 1; i <= mine.head.operands; ++i) {
      if (mine.place[i].inner != 0 && writes(s, seat_[part][i].slot) && !alike(s, part, i)) return false;
    }
    for (int i = 1; i <= other.head.operands; ++i) {
      const bool reads = other.place[i].inner != 0 && mine.place[0].inner != 0 && seat_[s][i].slot == seat_[part][0].slot;
      if (reads && !alike(part, s, i)) return false;
    }
  }
  return true;
}

/// The bytes of a part's value that lies in memory.
SmallReader::Range SmallReader::range_of(int part, int number) const {
  const Slot& slot = slot_[seat_[part][number].slot];
  return {slot.data, slot.data + slot.elements * static_cast<std::int64_t>(size_of(slot.dtype))};
}

/// Whether the thread of each element of `reader` reads as its operand what it wrote as `writer`'s result.
bool SmallReader::keeps_to_itself(int writer, int reader, int operand) const {
  const SmallPart &w = out_.program.part[writer], &r = out_.program.part[reader];
  const SmallPlace &to = w.place[0], &of = r.place[operand];
  if (r.head.op != SmallOp::ewise || seat_[writer][0].offset != seat_[reader][operand].offset) return false;
  if (w.head.count != r.head.count) return false;
  if (w.head.count == 1) return w.head.op == SmallOp::ewise || w.head.op == SmallOp::reduce;
  return w.head.op == SmallOp::ewise && to.even != 0 && of.even != 0 && to.step == of.step;
}

}  // namespace rm::cuda_ops
