// The file the pretended compiler makes: binary, versioned, for one target and compiler.
//
//   "RMSIMNPU" | u32 format | u32 flags | target 16 | compiler 16 | u64 payload bytes | u64
//   checksum payload: u64 text bytes, text, u64 weights, { u64 name bytes, name, u64 bytes, bytes }
//   ...
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rm::sim {

struct Artefact {
  std::string target, compiler;
  bool rounds = false;  ///< every operator's result is rounded: nothing may be fused
  std::string program;  ///< rm.ir/1, static shapes
  std::vector<std::pair<std::string, std::string>> embedded;  ///< weights by name
};

std::string encode(const Artefact& artefact);
/// True when the header is ours and of this target and compiler.
bool fits(std::string_view bytes, std::string_view target, std::string_view compiler);
/// Throws rm::plugin::Error(RM_DATA_LOSS) for what encode() did not make.
Artefact decode(std::string_view bytes);

}  // namespace rm::sim
