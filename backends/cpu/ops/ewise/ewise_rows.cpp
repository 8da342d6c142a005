// Runs compiled ewise programs block by block: load or point at operands, run the ops, store.
//
// Blocks are pieces of the innermost merged axis when that is long, else of the linear index, so a
// short inner axis does not make short blocks.
#include "ops/ewise/rows.hpp"

#include <cstring>

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "ops/ewise/program.hpp"

namespace rm::cpu {
namespace {

constexpr int kMaxAxes = 64;
constexpr int64_t kSharedFill = 512;
constexpr size_t kFills = 16;  // operands whose last fill is remembered

class Ewise {
 public:
  static constexpr const char* kOp = "ewise";
  static constexpr const char* kAlgorithm = "blocks";

  static const char* reject(const Problem& p) {
    return p.output(0).rank() > kMaxAxes ? "more than 64 axes" : nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 500 + static_cast<double>(p.output(0).numel()) *
                     (0.3 + 0.2 * static_cast<double>(p.attr_ints("code").size()) / 5);
  }

  Ewise(const Problem& p, Isa isa) : program_(compile_ewise(p, isa)) {
    const View y = p.output(0);
    out_bytes_ = dtype_bytes(y.dtype);
    std::vector<std::vector<int64_t>> strides{y.stride};
    for (size_t i = 0; i < p.num_inputs(); ++i) {
      View x = p.input(i);
      if (x.shape != y.shape) {
        throw std::invalid_argument(
            "[ewise] expected operands of the result's shape, got operand " + std::to_string(i) +
            " of another; try stride 0");
      }
      strides.push_back(std::move(x.stride));
    }
    nest_ = make_nest(y.shape, strides, 0);
    total_ = nest_.numel();
    inner_ = nest_.shape.back();
    for (const auto& s : nest_.strides) linear_.push_back(is_linear(s));
    // 16 KiB of slots keep L1 free for the operands' own lines.
    const int64_t room = 16384 / (program_.slots > 0 ? program_.slots : 1);
    const int64_t bytes = std::min<int64_t>(8192, std::max<int64_t>(1024, room / 1024 * 1024));
    block_ = bytes / program_.element_bytes;
    by_rows_ = inner_ >= 128 || nest_.rank() == 1;
    // An element repeated along a row is written out for one block of it, for all of its blocks.
    if (by_rows_ && inner_ > kSharedFill && repeats_along_rows()) {
      block_ = std::min(block_, kSharedFill);
    }
    per_row_ = by_rows_ ? (inner_ + block_ - 1) / block_ : 0;
    blocks_ = total_ == 0 ? 0
              : by_rows_  ? total_ / inner_ * per_row_
                          : (total_ + block_ - 1) / block_;
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return thread_bytes() * static_cast<uint64_t>(threads_); }

  rm_status* launch(const rm_launch& l) const {
    const double work = program_.ns_per_element * static_cast<double>(total_);
    const int threads = threads_for(work, blocks_, threads_);
    int failed = 0;
    parallel_ranges(blocks_, threads, 1, [&](int64_t begin, int64_t end, int thread) {
      char* memory =
          static_cast<char*>(l.workspace) + thread_bytes() * static_cast<uint64_t>(thread);
      if (run(l, begin, end, memory)) {
#pragma omp atomic write
        failed = 1;
      }
    });
    if (failed) {
      return plugin::fail(RM_INVALID_ARGUMENT,
                          "[ewise] expected non-zero integer divisors, got 0 (ZeroDivisionError)");
    }
    return nullptr;
  }

 private:
  uint64_t slot_bytes() const { return static_cast<uint64_t>(block_ * program_.element_bytes); }
  uint64_t thread_bytes() const {
    const uint64_t pointers = (static_cast<uint64_t>(program_.slots) * sizeof(void*) + 63) & ~63ull;
    return pointers + static_cast<uint64_t>(program_.slots) * slot_bytes() + 64;
  }

  bool is_linear(const std::vector<int64_t>& stride) const {
    int64_t expected = 1;
    for (int i = nest_.rank() - 1; i >= 0; --i) {
      if (nest_.shape[i] != 1 && stride[i] != expected) return false;
      expected *= nest_.shape[i];
    }
    return true;
  }

  int run(const rm_launch& l, int64_t begin, int64_t end, char* memory) const {
    auto** pointer = reinterpret_cast<void**>(memory);
    char* slots =
        memory + ((static_cast<size_t>(program_.slots) * sizeof(void*) + 63) & ~size_t{63});
    int flag = 0;
    for (const ConstantFill& c : program_.constants) {
      pointer[c.slot] = slots + slot_bytes() * static_cast<uint64_t>(c.slot);
      fill(pointer[c.slot], c);
    }
    Memory m{pointer, slots, &flag, {}};
    int64_t at[kMaxAxes];
    if (!by_rows_) {
      for (int64_t start = begin * block_; begin < end; ++begin, start += block_) {
        coordinates(start, at);
        block(l, start, at, std::min(total_ - start, block_), m);
      }
      return flag;
    }
    const size_t last = static_cast<size_t>(nest_.rank()) - 1;
    int64_t piece = begin % per_row_, row_start = begin / per_row_ * inner_;
    coordinates(row_start, at);
    for (; begin < end; ++begin) {
      at[last] = piece * block_;
      block(l, row_start + at[last], at, std::min(inner_ - at[last], block_), m);
      if (++piece < per_row_) continue;
      piece = 0;
      row_start += inner_;
      next_row(at);
    }
    return flag;
  }

  /// A thread's slots, and which element the slots of repeated operands are full of.
  struct Memory {
    void** pointer;
    char* slots;
    int* flag;
    const char* filled[kFills];
  };

  /// Some operand has another element for every row, and only that.
  bool repeats_along_rows() const {
    for (const OperandLoad& o : program_.loads) {
      const auto& stride = nest_.strides[static_cast<size_t>(o.operand) + 1];
      if (stride.back() != 0) continue;
      for (int64_t s : stride) {
        if (s != 0) return true;
      }
    }
    return false;
  }

  /// An operand that repeats one element along the row; blocks of a row share what is written.
  void repeat(const OperandLoad& o, size_t number, const char* element, Memory& m) const {
    if (number < kFills && m.filled[number] == element) return;
    if (number < kFills) m.filled[number] = element;
    o.load(m.pointer[o.slot], element, 0, std::min(block_, inner_));
  }

  void fill(void* slot, const ConstantFill& c) const {
    for (int64_t i = 0; i < block_; ++i) {
      if (c.cls == Class::f32) static_cast<float*>(slot)[i] = static_cast<float>(c.value);
      if (c.cls == Class::f64) static_cast<double*>(slot)[i] = c.value;
      if (c.cls == Class::i64) static_cast<int64_t*>(slot)[i] = static_cast<int64_t>(c.value);
    }
  }

  void block(const rm_launch& l, int64_t start, const int64_t* at, int64_t n, Memory& m) const {
    void** pointer = m.pointer;
    int* flag = m.flag;
    auto own = [&](int slot) { return m.slots + slot_bytes() * static_cast<uint64_t>(slot); };
    for (size_t number = 0; number < program_.loads.size(); ++number) {
      const OperandLoad& o = program_.loads[number];
      const auto* base = static_cast<const char*>(l.inputs[o.operand]);
      const int64_t inner_stride = nest_.strides[o.operand + 1].back();
      if (linear_[o.operand + 1]) {
        const char* here = base + start * o.element_bytes;
        if (o.same_type) {
          pointer[o.slot] = const_cast<char*>(here);
        } else {
          pointer[o.slot] = own(o.slot);
          o.load(pointer[o.slot], here, 1, n);
        }
      } else if (o.same_type && inner_stride == 1 && at[nest_.rank() - 1] + n <= inner_) {
        pointer[o.slot] =
            const_cast<char*>(base + offset(at, nest_.strides[o.operand + 1]) * o.element_bytes);
      } else if (by_rows_ && inner_stride == 0) {
        pointer[o.slot] = own(o.slot);
        repeat(o, number, base + offset(at, nest_.strides[o.operand + 1]) * o.element_bytes, m);
      } else {
        pointer[o.slot] = own(o.slot);
        gather(o, base, at, n, static_cast<char*>(pointer[o.slot]));
      }
    }
    const bool straight =
        linear_[0] || (nest_.strides[0].back() == 1 && at[nest_.rank() - 1] + n <= inner_);
    char* y = static_cast<char*>(l.outputs[0]) + offset(at, nest_.strides[0]) * out_bytes_;
    const size_t last = program_.ops.size();
    for (size_t i = 0; i < last; ++i) {
      const MicroOp& op = program_.ops[i];
      const bool direct = i + 1 == last && program_.result_direct && straight;
      void* dst = direct ? y : own(op.dst);
      op.fn(dst, at_slot(pointer, op.a, flag), at_slot(pointer, op.b, flag),
            at_slot(pointer, op.c, flag), n);
      pointer[op.dst] = dst;
      if (direct) return;
    }
    if (straight) {
      program_.store(pointer[program_.result], y, 1, n);
    } else {
      scatter(static_cast<char*>(pointer[program_.result]), static_cast<char*>(l.outputs[0]), at,
              n);
    }
  }

  static const void* at_slot(void* const* pointer, int slot, int* flag) {
    return slot >= 0 ? pointer[slot] : slot == kFlagSlot ? flag : nullptr;
  }

  void coordinates(int64_t linear, int64_t* at) const {
    for (int i = nest_.rank() - 1; i > 0; --i) {
      at[i] = linear % nest_.shape[i];
      linear /= nest_.shape[i];
    }
    at[0] = linear;
  }
  int64_t offset(const int64_t* at, const std::vector<int64_t>& stride) const {
    int64_t sum = 0;
    for (int i = 0; i < nest_.rank(); ++i) sum += at[i] * stride[i];
    return sum;
  }
  /// To the start of the next innermost row.
  void next_row(int64_t* at) const {
    int i = nest_.rank() - 1;
    at[i] = 0;
    while (--i >= 0) {
      if (++at[i] < nest_.shape[i]) return;
      at[i] = 0;
    }
  }

  void gather(const OperandLoad& o, const char* base, const int64_t* from, int64_t n,
              char* dst) const {
    const auto& stride = nest_.strides[o.operand + 1];
    int64_t at[kMaxAxes];
    std::memcpy(at, from, sizeof(int64_t) * static_cast<size_t>(nest_.rank()));
    for (int64_t done = 0; done < n;) {
      const int64_t run = std::min(n - done, inner_ - at[nest_.rank() - 1]);
      o.load(dst + done * o.class_bytes, base + offset(at, stride) * o.element_bytes, stride.back(),
             run);
      done += run;
      next_row(at);
    }
  }

  void scatter(const char* src, char* base, const int64_t* from, int64_t n) const {
    int64_t at[kMaxAxes];
    std::memcpy(at, from, sizeof(int64_t) * static_cast<size_t>(nest_.rank()));
    for (int64_t done = 0; done < n;) {
      const int64_t run = std::min(n - done, inner_ - at[nest_.rank() - 1]);
      program_.store(src + done * program_.result_bytes,
                     base + offset(at, nest_.strides[0]) * out_bytes_, nest_.strides[0].back(),
                     run);
      done += run;
      next_row(at);
    }
  }

  EwiseProgram program_;
  Nest nest_;  // operand 0 is y, i + 1 is x_i
  std::vector<bool> linear_;
  int64_t out_bytes_ = 4, total_ = 0, inner_ = 1, block_ = 256, per_row_ = 0, blocks_ = 0;
  bool by_rows_ = true;
  int threads_ = 1;
};

}  // namespace

std::span<const rm_kernel> ewise_rows() { return isa_rows<Ewise>(); }

}  // namespace rm::cpu
