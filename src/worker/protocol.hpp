// The bodies of the messages as structs. Every struct encodes itself and decodes with checks.
//
// Tensors never travel here: a TensorSlot says where one lies in a shared memory file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "rm/backend.h"

namespace rm::worker {

struct TensorSlot {
  std::string name;
  DLDataType dtype{};
  std::vector<int64_t> dims;
  uint64_t offset = 0, bytes = 0;
  std::string digest;  ///< of its content, or empty

  /// Throws unless the slot has the size its type says and lies inside `memory_bytes`.
  void check(uint64_t memory_bytes) const;
};
using Slots = std::vector<TensorSlot>;

/// Bytes of a tensor; throws for negative dims and sizes beyond 2^62.
uint64_t tensor_bytes(DLDataType dtype, const std::vector<int64_t>& dims);

/// What the worker says when it is ready.
struct Ready {
  uint64_t pid = 0;
  std::string backend, version, build_id, fingerprint;
  std::string encode() const;
  static Ready decode(std::string_view bytes);
};

/// Descriptors: the weights, when there are constants.
struct CompileRequest {
  uint64_t device = 0;
  std::string program;
  std::vector<std::pair<std::string, std::string>> options;
  Slots constants;
  std::string encode() const;
  static CompileRequest decode(std::string_view bytes);
};

/// Descriptors: the inputs' and outputs' memory, then the weights, when there are constants.
/// `states` have names and types and lie in no memory of the client's: every run names a set of
/// them. An artefact that lies in a file (`file_bytes` > 0) is that part of the last descriptor, and
/// `artefact` is empty.
struct LoadRequest {
  uint64_t device = 0;
  std::string artefact;
  Slots constants, inputs, outputs, states;
  uint64_t file_offset = 0, file_bytes = 0;
  std::string encode() const;
  static LoadRequest decode(std::string_view bytes);
};

/// A set of tensors that stay on the device between runs, zeros at first. Slots have no place.
struct StatesRequest {
  uint64_t device = 0;
  Slots slots;
  std::string encode() const;
  static StatesRequest decode(std::string_view bytes);
};

/// Which part of every tensor is copied: along `axis` `count` elements at most (as many as both
/// sides have), and along the first axis row `rows[i]` to row i (none: row i to row i).
struct StatesRegion {
  uint64_t axis = 0, from_start = 0, to_start = 0, count = 0;
  std::vector<uint64_t> rows;
};

/// A handle of 0 stands for the client's memory (the descriptor), where `host` lies.
struct CopyStatesRequest {
  uint64_t from = 0, to = 0;
  StatesRegion region;
  Slots host;
  std::string encode() const;
  static CopyStatesRequest decode(std::string_view bytes);
};

struct Progress {
  double fraction = -1;  ///< < 0: unknown
  std::string stage;
  std::string encode() const;
  static Progress decode(std::string_view bytes);
};

struct Failure {
  uint32_t code = 0;
  std::string reason, message;
  std::string encode() const;
  static Failure decode(std::string_view bytes);
  /// With `where` in front of the message; a code that is none becomes RM_UNKNOWN.
  Error error(const std::string& where, const std::string& more = {}) const;
};

}  // namespace rm::worker
