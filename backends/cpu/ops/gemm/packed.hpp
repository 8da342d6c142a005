// The packed gemm: b in panels, blocks of them in the caches, tiles over threads.
//
// Every element of c is one chain of multiply-adds in the order of k, so neither blocking nor the
// number of threads changes a bit of the result. A b that may not be packed once is packed at every
// launch: small ones whole, large ones a few panels at a time in each thread's cache
// (streamed.cpp).
#pragma once

#include <vector>

#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

/// Makes panels of a b that does not lie in memory as numbers: weights of few bits. Panels are f32.
class PanelSource {
 public:
  virtual ~PanelSource() = default;
  /// Panels [begin, end) to dst; `launch` is what run() was given, scratch has scratch_bytes().
  virtual void fill(const void* launch, int64_t begin, int64_t end, char* dst,
                    char* scratch) const = 0;
  virtual uint64_t scratch_bytes() const = 0;
};

class PackedGemm {
 public:
  /// Static string, or null when the problem is supported.
  static const char* reject(const GemmProblem& g);
  /// The same for kernels that share the panels and want rows of the residual dense.
  static const char* reject_scattered(const GemmProblem& g);

  /// rm_kernel.edges of a row with these kernels.
  static std::vector<rm_edge> edges(const KernelSet& kernels);

  PackedGemm(GemmProblem problem, const KernelSet& kernels, const PanelSource* source = nullptr);

  uint64_t workspace_bytes() const { return workspace_bytes_; }
  bool packs(size_t operand) const { return operand == kB && g_.constant_b; }
  const char* layout(size_t) const { return k_.layout[type_]; }
  uint64_t packed_bytes(size_t) const;
  /// `source` has the strides that the problem was prepared with.
  void prepack(size_t operand, const rm_tensor& source, void* packed) const;
  void launch(const rm_launch& l) const { run(l, nullptr); }
  /// `source_launch` goes to the source's fill().
  void run(const rm_launch& l, const void* source_launch) const;

 private:
  struct Operands : Pointers {
    using Pointers::Pointers;
    const void* source_launch = nullptr;
    const char* panels = nullptr;  // of the current batch, or of all when they are prepacked
    int64_t first_panel = 0;  // that `panels` begins with
    const char* a_rows =
        nullptr;  // when not null: rows of a from `first_row` on, as tiles read them
    int64_t first_row = 0;
  };
  struct Scratch {
    float* acc;
    char* a;
  };
  /// A block of rows of a, as the tiles read it.
  struct Rows {
    const char* data;
    int64_t stride;  // elements
    int64_t batch, first, count;
  };

  void plan_blocks();
  uint64_t copy_bytes();
  void plan_threads();
  void plan_stream();
  int64_t panel_bytes() const { return steps_ * step_bytes_; }
  uint64_t batch_bytes() const { return static_cast<uint64_t>(panels_ * panel_bytes()); }
  Scratch scratch(void* workspace, int thread) const;

  void pack(const void* src, void* dst, int64_t begin, int64_t end) const;
  void run_streamed(const Operands& o, const rm_launch& l, int threads) const;
  void copy_rows(const Operands& o, char* to, int64_t first, int64_t begin, int64_t end) const;
  void stream_panels(Operands o, char* panels, int64_t rows_end, int64_t p0, int64_t p1,
                     const Scratch& s) const;
  void run_shared(const Operands& o, const rm_launch& l, int threads) const;
  void run_batched(const Operands& o, const rm_launch& l, int threads) const;
  void run_rows(const Operands& o, int64_t begin, int64_t end, int64_t p0, int64_t p1,
                const Scratch& s) const;
  void run_block(const Operands& o, int64_t batch, int64_t row, int64_t rows, int64_t p0,
                 int64_t p1, const Scratch& s) const;
  void few_rows(const Operands& o, const Rows& a, int64_t p0, int64_t p1, const Scratch& s) const;
  void many_rows(const Operands& o, const Rows& a, int64_t p0, int64_t p1, const Scratch& s) const;
  void copy_chunk(const Operands& o, const Rows& a, int64_t k0, int64_t steps, char* to) const;
  void fetch(const Operands& o, int64_t batch, int64_t row, int64_t rows, int64_t panel) const;
  const char* panels_of(const Operands& o, int64_t batch) const;
  void store(const Operands& o, const float* acc, int64_t batch, int64_t row, int64_t rows,
             int64_t panel) const;
  void gather_residual(const char* from, int64_t rows, int64_t cols, char* to) const;

  GemmProblem g_;
  const KernelSet& k_;
  const PanelSource* source_;
  TileType type_;    // of a, bias, residual and c
  TileType b_type_;  // of the panels
  int64_t element_bytes_;
  int64_t step_bytes_;  // of a panel
  int64_t steps_;       // of k
  int64_t panels_;
  int64_t kc_;   // steps of k in a block
  int64_t mc_;   // rows in a block
  int64_t nc_;   // panels in a block
  bool copy_a_;   // a is widened or gathered first
  bool columns_;  // a is transposed: tiles read its copy by columns
  int64_t lda_;   // of a copy of whole rows
  int64_t chunk_lda_;      // of a copy of a block of k
  int64_t tile_bytes_ = 0;  // of a tile's columns
  int threads_;  // at most
  bool streamed_ = false;
  int64_t stream_rows_ = 0;    // rows of a a pass over b serves
  int64_t stream_panels_ = 0;  // panels packed at a time
  uint64_t acc_bytes_ = 0, a_bytes_ = 0, thread_bytes_ = 0, shared_bytes_ = 0;
  uint64_t workspace_bytes_ = 0;
};

}  // namespace rm::cpu::gemm
