// The modules' rule about shared memory against counting bytes: random small layouts of up to three
// axes, strides of either sign, 0 among them. Prints how many it proved apart; ends with 1 where it
// called two views apart that meet. Built and run by test_alias_rule.py.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "_shim/alias_shim.hpp"

using namespace rm::cuda_ops;

namespace {

struct View {
  Tensor tensor;
  std::set<long> bytes;
  bool repeats = false;  // an element twice
};

View random_view(std::mt19937& random, DType type) {
  View v;
  Tensor& t = v.tensor;
  t.dtype = type, t.rank = 1 + static_cast<int>(random() % 3);
  const long size = size_of(type), first = 4096 + static_cast<long>(random() % 40) * size;
  t.data = reinterpret_cast<void*>(first);
  for (int d = 0; d < t.rank; ++d) {
    t.shape[d] = 1 + static_cast<long>(random() % 4);
    t.stride[d] = static_cast<long>(random() % 13) - (random() % 6 == 0 ? 6 : 0);
  }
  std::set<long> elements;
  for (long e = 0; e < numel(t); ++e) {
    long rest = e, at = first;
    for (int d = t.rank - 1; d >= 0; --d) {
      at += rest % t.shape[d] * t.stride[d] * size;
      rest /= t.shape[d];
    }
    v.repeats |= !elements.insert(at).second;
    for (long b = 0; b < size; ++b) v.bytes.insert(at + b);
  }
  return v;
}

bool meet(const View& a, const View& b) {
  for (const long byte : a.bytes) {
    if (b.bytes.count(byte)) return true;
  }
  return false;
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937 random(static_cast<unsigned>(std::atol(arguments[1])));
  long wrong = 0, apart = 0, proven = 0;
  for (int i = 0; i < 10000; ++i) {
    constexpr DType kTypes[] = {DType::u8, DType::bf16, DType::f32};
    const DType type = kTypes[random() % 3];
    const View a = random_view(random, type), b = random_view(random, type);
    const bool met = meet(a, b), said = lie_apart(a.tensor, b.tensor);
    apart += !met, proven += said, wrong += said && met;
    wrong += lies_apart_from_itself(a.tensor) && a.repeats;
  }
  std::printf("%ld %ld %ld\n", wrong, apart, proven);
  return wrong != 0;
}
