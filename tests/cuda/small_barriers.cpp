// Barriers of small steps against counting bytes: random programs, of which every part is taken apart into
// what each thread of the kernel reads and writes. Two parts that no barrier separates must not touch a byte
// that one of them writes, unless the same thread does both; a part whose elements several blocks share must
// not do so with any other part, and its own elements must not either. Prints how many programs were read, how
// many barriers they have, how many parts had warps of their own, how many are shared by blocks, and how many
// programs are wrong, with the first of them. Built and run by test_small_barriers.py.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "small_steps/reader.hpp"

using namespace rm::cuda_ops;

namespace {

using Ints = std::vector<std::int64_t>;
constexpr int kRank = 2;
constexpr std::int64_t kF32 = 0x220, kI64 = 0x040;
constexpr int kEvery = -1;  // in place of a thread: which one is not said

struct Touch {
  int part, thread;
  bool writes;
};

/// A value of the program: its sizes, of which 1 may be read as any.
struct Value {
  std::int64_t slot, offset;
  std::int64_t size[kRank], stride[kRank];
  bool input, whole;  // whole: of integers
};

class Maker {
 public:
  explicit Maker(unsigned seed) : random_(seed) {}

  SmallSteps make() {
    p_ = {}, values_.clear(), inner_.clear(), parts_.clear(), instructions_ = 0;
    for (auto& s : size_) s = pick({1, 2, 3, 7, 16, 33, 48});
    const int inputs = 1 + below(3), outputs = 1 + below(3);
    for (int i = 0; i < inputs; ++i) input(i == 0 && inputs > 1 && below(2) == 0);
    for (int i = 0; i < outputs; ++i) p_.outputs.push_back(tensor(false));
    const int parts = 1 + below(10);
    int stored = 0;
    for (int i = 0; i < parts; ++i) part(stored < outputs && (below(3) == 0 || parts - i <= outputs - stored), stored);
    // Inner values come behind inputs and outputs; their numbers are known only now.
    p_.program = {static_cast<std::int64_t>(inner_.size())};
    for (const auto& [type, count] : inner_) p_.program.push_back(type), p_.program.push_back(count);
    p_.program.insert(p_.program.end(), parts_.begin(), parts_.end());
    return p_;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  std::int64_t pick(std::initializer_list<std::int64_t> from) { return from.begin()[below(static_cast<int>(from.size()))]; }

  /// Of the program's sizes, dense or turned, in one piece of memory that tensors often share.
  Tensor tensor(bool whole) {
    Tensor t;
    t.dtype = whole ? DType::i64 : DType::f32, t.rank = kRank;
    for (int d = 0; d < kRank; ++d) t.shape[d] = size_[d];
    t.stride[0] = size_[1], t.stride[1] = 1;
    if (below(4) == 0) t.stride[0] = 1, t.stride[1] = size_[0];
    t.data = reinterpret_cast<void*>(std::uintptr_t{1} << 20 | static_cast<std::uintptr_t>(8192 * below(below(2) == 0 ? 2 : 60)));
    return t;
  }
  void input(bool whole) {
    Tensor t = tensor(whole);
    if (below(4) == 0) t.stride[below(kRank)] = 0;
    values_.push_back({static_cast<std::int64_t>(p_.inputs.size()), 0, {size_[0], size_[1]}, {t.stride[0], t.stride[1]}, true, whole});
    p_.inputs.push_back(t);
  }

  void place(const Value& v, const std::int64_t* sizes, bool reads) {
    parts_.push_back(v.slot);
    if (v.input) return;
    const bool inner = v.slot >= static_cast<std::int64_t>(p_.inputs.size() + p_.outputs.size());
    if (reads && inner && below(8) == 0) {  // one element of it for all
      parts_.push_back(below(static_cast<int>(v.size[0] * v.size[1])));
      for (int d = 0; d < kRank; ++d) parts_.push_back(0);
      return;
    }
    parts_.push_back(v.offset + (reads && inner && below(8) == 0 ? 1 : 0));  // or each one's neighbour
    for (int d = 0; d < kRank; ++d) parts_.push_back(v.size[d] == 1 && sizes[d] > 1 ? 0 : v.stride[d]);
  }
  /// A value that can be read as one of these sizes.
  const Value& readable(const std::int64_t* sizes, bool whole = false) {
    std::vector<const Value*> fit;
    for (const Value& v : values_) {
      bool fits = v.whole == whole;
      for (int d = 0; d < kRank; ++d) fits = fits && (v.input || v.size[d] == sizes[d] || v.size[d] == 1);
      if (fits) fit.push_back(&v);
    }
    return *fit[static_cast<std::size_t>(below(static_cast<int>(fit.size())))];
  }

  void part(bool stores, int& stored) {
    const bool whole = values_[0].whole;
    std::int64_t sizes[kRank] = {below(3) ? size_[0] : 1, below(3) ? size_[1] : 1};
    int op = stores ? 0 : below(5);  // two of five are element-wise
    if (op == 3 && !whole) op = 0;
    if (stores) sizes[0] = size_[0], sizes[1] = size_[1];
    std::int64_t made[kRank] = {sizes[0], sizes[1]};
    const int axis = below(kRank);
    if (op == 1) made[axis] = 1;
    const auto first = static_cast<std::int64_t>(p_.inputs.size());
    Value to{first + stored, 0, {made[0], made[1]}, {made[1], 1}, false, false};
    if (stores) {
      const Tensor& t = p_.outputs[static_cast<std::size_t>(stored++)];
      to.stride[0] = t.stride[0], to.stride[1] = t.stride[1];
    } else {
      if (below(4) == 0) to.stride[0] = 1, to.stride[1] = made[0];
      to.slot = first + static_cast<std::int64_t>(p_.outputs.size() + inner_.size());
      inner_.emplace_back(kF32, made[0] * made[1] + 1);  // one that nobody writes
    }
    operands(op, axis, sizes, to);
    values_.push_back(to);
  }

  void operands(int op, int axis, const std::int64_t* sizes, const Value& to) {
    const int count = op == 1 || op == 2 ? 1 : op == 3 ? 2 : 1 + below(3);
    std::int64_t a = below(4), b = std::int64_t{1} << axis;  // reduce: the kind, the axis
    if (op == 2) a = below(2), b = 0;
    if (op == 3) a = axis, b = size_[axis];
    if (op == 0 || op == 4) {
      op = 0, a = instructions_, b = 1;
      p_.code.code.push_back({count == 1 ? kNeg : kAdd, 0, 0, count == 1 ? -1 : count - 1, -1});
      ++instructions_;
    }
    for (std::int64_t x : {std::int64_t{op}, a, b, std::int64_t{kRank}, sizes[0], sizes[1], std::int64_t{count}}) parts_.push_back(x);
    place(to, sizes, false);
    if (op == 3) {
      place(values_[1], sizes, true);  // an input
      place(values_[0], sizes, true);
      return;
    }
    for (int i = 0; i < count; ++i) place(readable(sizes), sizes, true);
  }

  std::mt19937 random_;
  std::int64_t size_[kRank] = {};
  SmallSteps p_;
  std::vector<Value> values_;
  std::vector<std::pair<std::int64_t, std::int64_t>> inner_;
  Ints parts_;
  std::int64_t instructions_ = 0;
};

/// What the kernel's threads touch in a part, byte by byte. Inner values lie in another space.
class Counting {
 public:
  Counting(const SmallStepsArgs& args, int blocks) : args_(args), blocks_(blocks) {}

  /// The number of a part that meets another one; -1: none does.
  int wrong() {
    for (int s = 0; s < args_.parts; ++s) {
      const SmallPart& part = args_.program.part[s];
      if (part.head.meet != 0) bytes_.clear();
      if (!count(s, part)) return s;
    }
    alone_ = true;
    for (int s = 0; s < args_.parts; ++s) {
      if (args_.program.part[s].head.split == 0) continue;
      for (int other = 0; other < args_.parts; ++other) {
        bytes_.clear();
        if (!count(s, args_.program.part[s]) || (other != s && !count(other, args_.program.part[other]))) return s;
      }
    }
    return -1;
  }

 private:
  bool touch(int part, int thread, const SmallPlace& at, std::int64_t element, bool writes) {
    const auto base = reinterpret_cast<std::uintptr_t>(at.data);
    for (int b = 0; b < size_of(at.dtype); ++b) {
      auto& seen = bytes_[{at.inner != 0, base + static_cast<std::uintptr_t>(element * size_of(at.dtype) + b)}];
      for (const Touch& t : seen) {
        const bool same = t.thread == thread && thread != kEvery;
        const bool asked = t.part != part || (alone_ && args_.program.part[part].head.split != 0);
        if (asked && (t.writes || writes) && !same) return false;
      }
      seen.push_back({part, thread, writes});
    }
    return true;
  }
  static std::int64_t offset(const SmallPart& p, const SmallPlace& at, std::int64_t element, int skip = -1) {
    std::int64_t out = 0;
    for (int d = kSmallRank - 1; d >= 0; --d) {
      if (d != skip) out += element % p.size[d] * at.stride[d];
      element /= p.size[d];
    }
    return out;
  }
  static std::int64_t coordinate(const SmallPart& p, std::int64_t element, int axis) {
    for (int d = kSmallRank - 1; d > axis; --d) element /= p.size[d];
    return element % p.size[axis];
  }
  /// Where blocks are asked about, no thread of the parts that the first one has alone is another's.
  int thread_of(const SmallHead& h, std::int64_t number) const {
    const int threads = h.warps * 32, block = h.split != 0 ? static_cast<int>(number / threads % blocks_) : 0;
    if (alone_ && h.split == 0) return kEvery;
    return block * kSmallThreads + static_cast<int>((h.warp * 32 + number % threads) % kSmallThreads);
  }

  bool count(int s, const SmallPart& p) {
    std::int64_t all = 1;
    for (int d = 0; d < kSmallRank; ++d) all *= p.size[d];
    const SmallHead& h = p.head;
    std::map<std::int64_t, int> results;  // of a reduction: its number by the place it is stored at
    for (std::int64_t e = 0; e < all; ++e) {
      int reads = kEvery, writes = kEvery;
      if (h.op == SmallOp::ewise || h.op == SmallOp::gather) reads = writes = thread_of(h, e);
      if (h.op == SmallOp::reduce) {
        // A warp a result; its first lane stores it.
        const auto number = results.emplace(offset(p, p.place[0], e), static_cast<int>(results.size())).first->second;
        writes = alone_ ? kEvery : static_cast<int>((h.warp + number % h.warps) * 32 % kSmallThreads);
        if (coordinate_of_axes(p, e) != 0) writes = -2;  // stored once
      }
      if (h.op == SmallOp::gather) {
        for (std::int64_t k = 0; k < h.first; ++k) {
          if (!touch(s, reads, p.place[1], offset(p, p.place[1], e, p.axes) + k * p.place[1].stride[p.axes], false)) return false;
        }
        if (!touch(s, reads, p.place[2], offset(p, p.place[2], e), false)) return false;
      } else {
        for (int i = 1; i <= h.operands; ++i) {
          if (!touch(s, reads, p.place[i], offset(p, p.place[i], e), false)) return false;
        }
      }
      if (writes != -2 && !touch(s, writes, p.place[0], offset(p, p.place[0], e), true)) return false;
    }
    return true;
  }
  static std::int64_t coordinate_of_axes(const SmallPart& p, std::int64_t e) {
    std::int64_t sum = 0;
    for (int d = 0; d < kSmallRank; ++d) {
      if (p.axes >> d & 1) sum += coordinate(p, e, d);
    }
    return sum;
  }

  const SmallStepsArgs& args_;
  bool alone_ = false;  // asked: what blocks share, whatever barriers there are
  int blocks_;
  std::map<std::pair<bool, std::uintptr_t>, std::vector<Touch>> bytes_;
};

}  // namespace

int main(int, char** arguments) {
  const auto seed = static_cast<unsigned>(std::strtoul(arguments[1], nullptr, 10));
  int read = 0, barriers = 0, apart = 0, split = 0, wrong = 0, first = -1;
  for (int i = 0; i < 1500; ++i) {
    const SmallSteps p = Maker(seed * 1500u + static_cast<unsigned>(i)).make();
    SmallStepsArgs args{};
    SmallReader reader(p, args);
    if (!reader.run()) continue;
    ++read;
    for (int s = 0; s < args.parts; ++s) {
      barriers += args.program.part[s].head.meet;
      apart += args.program.part[s].head.warps < kSmallThreads / 32 ? 1 : 0;
      split += args.program.part[s].head.split;
    }
    if (Counting(args, reader.blocks()).wrong() >= 0 && wrong++ == 0) first = i;
  }
  std::printf("%d %d %d %d %d %d\n", read, barriers, apart, split, wrong, first);
}
