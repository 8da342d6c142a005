// What a program takes: the sizes of its inputs and the relations among them, compiled so that a
// call's sizes are judged in well under a microsecond.
//
// The first input that has a plain symbol as a size gives the symbol its value; every other size
// and every relation is a test. A test with a symbol that no looked-at input gives is left out:
// the engine solves for such symbols when it makes a plan, and checks the rest there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.hpp"

namespace rm::ir {

class Signature {
 public:
  /// Of the head of a program's text; the nodes are not read. Throws rm::Error.
  explicit Signature(std::string_view text);

  const std::vector<Dims>& inputs() const { return inputs_; }
  const std::vector<Relation>& relations() const { return relations_; }

  /// The test for calls whose inputs marked `skip` are not looked at (missing marks: none is).
  class Test {
   public:
    struct Input {
      size_t number, rank;
    };
    /// The inputs that are looked at, and how many axes each has to have.
    const std::vector<Input>& inputs() const { return looked_at_; }
    /// `sizes`: those of the inputs above, one after the other.
    bool accepts(const std::vector<int64_t>& sizes) const;

   private:
    friend class Signature;
    class Compiler;
    enum class Op : uint8_t { kConstant, kSymbol, kAdd, kSub, kMul, kFloorDiv, kMod, kMin, kMax };
    struct Step {
      Op op;
      int64_t value;  // of a constant; the number of a symbol
    };
    using Expression = std::vector<Step>;  // postfix
    struct Equal {
      size_t at;  // among the sizes
      Expression expected;
    };
    struct Compared {
      Expression left, right;
      Relation relation;
    };
    static bool evaluate(const Expression& steps, const std::vector<int64_t>& symbols,
                         int64_t& out);

    std::vector<Input> looked_at_;
    std::vector<size_t> given_;  // by symbol: which size gives its value
    std::vector<SymbolRange> ranges_;  // by symbol
    std::vector<Equal> equal_;
    std::vector<Compared> compared_;
  };
  Test test(const std::vector<bool>& skip) const;

 private:
  std::vector<Dims> inputs_;
  std::map<std::string, SymbolRange, std::less<>> symbols_;
  std::vector<Relation> relations_;
};

}  // namespace rm::ir
