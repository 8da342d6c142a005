// cuBLASLt, found at run time, and what was learned about it: plans of problems seen, the fastest
// of its algorithms where they were timed, the fastest row of the table. One object a device and
// process is enough; it may be used by several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// A product as the library sees it, in columns: d [rows, columns] = epilogue(op(a) op(b)). All
/// pitches and strides are in elements. The bytes of the key decide which plan is used.
struct LibraryProduct {
  std::int64_t rows, columns, depth, batch;
  std::int64_t a_pitch, b_pitch, c_pitch, d_pitch, aux_pitch;
  std::int64_t a_batch, b_batch, c_batch, d_batch, aux_batch;
  std::int64_t workspace_bytes;
  std::int32_t dtype;  // DType of every matrix
  std::int32_t trans_a, trans_b, tf32, epilogue;
  std::int32_t alignment[6];           // of a, b, c, d, aux, bias in bytes, at most 256
  std::int32_t add_c, device, unused;  // no bytes of a key are left to chance
};

struct LibraryOperands {
  const void *a, *b, *c, *bias;
  void *d, *aux;
  float alpha;
};

/// cublasLtEpilogue_t, those used here.
enum LibraryEpilogue : std::int32_t {
  kPlain = 1,
  kRelu = 2,
  kBias = 4,
  kReluBias = 6,
  kGelu = 32,
  kGeluBias = 36,
  kGeluAux = 160,
  kGeluAuxBias = 164,
};

class GemmLibrary {
 public:
  /// Looks for the library in what is loaded, in `paths`, then on the loader's path.
  explicit GemmLibrary(std::vector<std::string> paths);
  ~GemmLibrary();
  GemmLibrary(const GemmLibrary&) = delete;
  GemmLibrary& operator=(const GemmLibrary&) = delete;

  /// Null where the library was found, else why it was not.
  const char* why_not() const;
  /// cublasLtGetVersion, 0 without the library.
  std::size_t version() const;

  /// Null: an algorithm exists for the product; else why not. Makes the plan.
  const char* plan(const LibraryProduct& p, int candidates);
  /// Runs a product; `tune`: times the candidates first if that was not done. An algorithm that the
  /// library refuses to run is forgotten and the next one runs; without any left the product is
  /// Unsupported, and plan() says so from then on.
  Status run(const LibraryProduct& p, const LibraryOperands& o, Workspace workspace, Stream stream,
             bool tune);

  /// The row that was fastest for a problem's key: -1 while unknown.
  int known_row(const std::string& key) const;
  void remember_row(const std::string& key, int row);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rm::cuda_ops
