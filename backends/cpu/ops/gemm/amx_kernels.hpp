// What the gemm on matrix tiles (amx.cpp) and its kernels (isa_amx.cpp) agree on.
//
// Plain data and function pointers only, like tile.hpp.
#pragma once

#include "ops/gemm/tile.hpp"

namespace rm::cpu::gemm {

constexpr int kAmxRows = 16;        // of x in a group
constexpr int kAmxColumns = 32;     // rows of the weight in a chunk: two tiles
constexpr int kAmxBlock = 32;       // elements of k in a tile
constexpr int kAmxTileBytes = 1024;
constexpr int kAmxPartial = 2 * kAmxRows * kAmxColumns;

/// Groups of rows of x as tiles: [group][block of k][pair of k][row], zeros behind the last row and
/// the last k. Units [begin, end) are blocks, numbered group after group.
struct AmxSpread {
  const void* src;
  int64_t row_stride, col_stride, m, k;
  int64_t begin, end;
  void* dst;
};

/// Blocks of k [begin, end) of a chunk's rows as right operands: [block][half of the rows][pair of k][row],
/// 16 rows a line. Zeros behind the last k.
struct AmxCopy {
  const void* src;
  int64_t row_bytes, k, begin, end;
  void* dst;
};

/// Two chunks with one group of rows of x, one chunk with two groups, or one with one: what is null
/// is not there. acc[i] receives [kAmxRows][kAmxColumns] sums: of chunk i, or of group i.
///
/// Every sum is one chain in the order of k, whatever stands beside it.
struct AmxArgs {
  const void* x[2];
  const void* w[2];
  int64_t row_bytes;   // of the weight
  int64_t step_bytes;  // from a row's block of k to its next: kAmxBlock elements, or of a copy in tiles
  int64_t k;
  float* acc[2];
  /// Chunks whose rows are fetched into the second-level cache meanwhile; null: nothing to fetch.
  const void* next[2];
};

/// One or two groups of rows of x, in order of k, with a part of k of a chunk as AmxCopy makes it.
///
/// Every sum is the same chain as that of AmxArgs.
struct AmxNear {
  const void* x;
  int64_t x_row_bytes;
  bool two;
  const void* w;
  int64_t blocks;
  float* acc;  // [2 * kAmxRows][kAmxColumns]
  /// k in several calls: kAmxPartial floats that keep the sums as tiles between them, those of the next
  /// two groups behind.
  float* partial;
  bool continues, more;  // not the first of these calls; not the last, so that acc is not written
  /// Lines that are asked for meanwhile: of the result, to be written; and rows of the next part, as
  /// many bytes as this one's k has, for the second-level cache.
  char* c;
  int64_t c_rows, c_row_bytes;
  const void* ahead;
  int64_t ahead_rows, ahead_row_bytes;
};

struct AmxSet {
  void (*open)();  // before a thread multiplies: its tiles' shapes
  void (*multiply)(const AmxArgs&);
  void (*close)();
  void (*spread)(const AmxSpread&);
  void (*copy)(const AmxCopy&);
  void (*multiply_near)(const AmxNear&);
  StoreFn store[kActivations];  // of sums [rows][kAmxColumns] to bf16
};

}  // namespace rm::cpu::gemm
