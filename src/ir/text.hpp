// The text form (.rmir): prints and parses back byte for byte. After Graph::compact() it is
// canonical, so it is also what the cache hashes and what crosses to worker processes.
//
//   rmir 1
//   sym s0 [1,512]
//   input %0 "input_ids" : i64[s0,s1]
//   where s0<=512
//   weight %1 "embeddings.weight" : f32[100,64]
//   literal %2 : f32[] = 0000803f
//   %3 = embedding(%1, %0) : f32[s0,s1,64]
//   %4 = sort(%3, _) {axis=1, eps=0x1p-3, kind="max", axes=[0,1], imm=f[], shape=<s0,2*s1>} : ...
//   return %3, %4
//
// `_` is an absent operand. Ints are plain, floats hexadecimal, int lists [..], float lists f[..],
// dims <..>, strings quoted with \" \\ \n \xHH escapes, literal bytes in hexadecimal.
#pragma once

#include <string>
#include <string_view>

#include "ir/graph.hpp"

namespace rm::ir {

std::string print(const Graph& graph);
/// What stands between the braces of a node; equal texts mean equal attributes.
std::string print(const Attrs& attrs);
/// Throws rm::Error(RM_INVALID_ARGUMENT) with the line number; checks ids and sizes, not operators.
Graph parse(std::string_view text);
/// The symbols, inputs and relations at the head of a program; what follows is not read.
Graph parse_head(std::string_view text);

}  // namespace rm::ir
