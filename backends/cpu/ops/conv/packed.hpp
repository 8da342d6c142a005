// Convolutions as products with gemm's tiles: the rows of a product are neighbouring places of y, its
// columns output channels, and every element of the kernel adds one product over the channels of x.
// Weights lie in panels, in the order in which they are read, and are asked for a block ahead: at
// batch 1 the last layers of a network are bound by reading them.
//
// Every element of y is one chain of multiply-adds in the order kernel, channel; elements of the
// kernel that meet padding are left out. Neither tiles nor threads change a bit of the result.
#pragma once

#include <string>
#include <vector>

#include "isa.hpp"
#include "ops/conv/packed_kernels.hpp"
#include "ops/conv/problem.hpp"
#include "ops/gemm/tile.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::conv {

class PackedConv {
 public:
  /// Static string, or null when the problem is supported.
  static const char* reject(const ConvProblem& c);
  PackedConv(ConvProblem problem, const gemm::KernelSet& tiles, const PackedSet& set);

  uint64_t workspace_bytes() const;
  bool packs(size_t operand) const { return operand == kW && c_.constant_w; }
  const char* layout(size_t) const { return layout_.c_str(); }
  uint64_t packed_bytes(size_t) const {
    return static_cast<uint64_t>(panels_ * panel_floats()) * sizeof(float);
  }
  void prepack(size_t, const rm_tensor& source, void* packed) const;
  void launch(const rm_launch& l) const;

 private:
  /// Neighbouring places of one line of y: what a tile computes.
  struct Rows {
    int64_t n, at[3], count;
  };
  /// Where an element of the kernel meets x on the last axis: places [from, to) of a line of y.
  struct Meeting {
    int64_t from, to, first;  // first: elements from the start of x's line to place 0's
  };
  struct Task {
    const rm_launch& l;
    const char* panels;
    float* acc;  // [rows of a block][nr]
  };
  /// Rows [begin, end) by panels [p0, p1).
  struct Share {
    int64_t begin, end, p0, p1;
  };
  /// Rows [begin, begin + count) of a tile that meet x; x: what the first of them meets.
  struct Met {
    const float* x = nullptr;
    int64_t begin = 0, count = 0;
  };

  void drop_strides();
  void plan_lines();
  int64_t pitch(Operand o) const;
  bool follows(Operand o) const;
  void plan_rows();
  bool meets_whole() const;
  void plan_blocks();
  int64_t taps() const { return c_.k[0] * c_.k[1] * c_.k[2]; }
  int64_t panel_floats() const { return taps() * c_.from * tiles_.nr; }
  int64_t offset(Operand o, const Rows& r) const;
  Share share(int thread, int team) const;
  void pack_panel(const float* w, char* panels, int64_t panel) const;
  void run(const Task& t, const Share& s) const;
  void run_strips(const Task& t, const Share& s, bool more) const;
  void run_panel(const Task& t, const Share& s, int64_t panel, bool more) const;
  int64_t x_pitch() const { return c_.stride[2] * c_.step[kX][4]; }
  Met meet(const Task& t, const Rows& rows, int64_t tap) const;
  PanelStore place(const Task& t, const Rows& r, int64_t panel) const;

  ConvProblem c_;
  const gemm::KernelSet& tiles_;
  const PackedSet& set_;
  std::vector<Rows> rows_;
  std::vector<int64_t> lines_[2];  // [place][element of the kernel]: elements from x; -1: nowhere
  std::vector<Meeting> meetings_;
  bool strips_ = false;
  int64_t panels_;
  int64_t channels_ = 1, block_rows_ = 1;  // of a block
  int64_t group_ = 1;                      // panels that a tile's rows meet in turn
  int threads_ = 1;
  uint64_t thread_bytes_ = 0;
  std::string layout_;
};

}  // namespace rm::cpu::conv
