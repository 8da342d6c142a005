// Checks that forward and backward share, and how a row is spread over threads.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "norm/api.hpp"

namespace rm::cuda_ops {

inline const char* name_of(Norm kind) { return kind == Norm::rms ? "rmsnorm" : "layernorm"; }

/// `t` is an operand that must look like `x` (same dtype and shape, dense last axis).
inline Status check_like(const char* op, const char* what, const Tensor& t, const Tensor& x) {
  if (t.dtype != x.dtype || !same_shape(t, x)) {
    return invalid(std::string("[") + op + "] expected " + what + " of x's shape and dtype (" +
                   name_of(x.dtype) + "), got " + name_of(t.dtype) + " of rank " +
                   std::to_string(t.rank) + "; try matching x");
  }
  if (!rows_of(t).valid) {
    return invalid(
        std::string("[") + op + "] expected " + what +
        " with a dense last axis and leading axes of one pitch, got other strides; try a "
        "contiguous tensor");
  }
  return {};
}

inline Status check_vector(const char* op, const char* what, const Tensor& t, const Tensor& x) {
  const std::int64_t n = x.shape[x.rank - 1];
  if (t.dtype != x.dtype || t.rank != 1 || t.shape[0] != n || !is_contiguous(t)) {
    return invalid(std::string("[") + op + "] expected " + what + " dense [" + std::to_string(n) +
                   "] of " + name_of(x.dtype) + ", got " + name_of(t.dtype) + " of rank " +
                   std::to_string(t.rank) + "; try matching x's last axis");
  }
  return {};
}

inline Status check_base(const char* op, const Tensor& x) {
  if (!is_float(x.dtype) || x.rank < 1) {
    return invalid(std::string("[") + op +
                   "] expected float32, bfloat16 or float16 of rank >= 1, "
                   "got " +
                   name_of(x.dtype) + " of rank " + std::to_string(x.rank) + "; try a cast");
  }
  if (x.shape[x.rank - 1] > 0x7fffffff) {
    return unsupported(std::string("[") + op +
                       "] expected a last axis below 2^31; try splitting it");
  }
  return {};
}

inline bool vector_ready(const Tensor& t) {
  return is_aligned(t.data, rows_of(t).pitch, t.dtype, 16);
}

/// How the forward kernel spreads a row: a warp or a block a row, `per` vectors a thread.
struct NormShape {
  bool warp;
  int per, threads;  // threads of a block
  std::int64_t blocks;
};

inline NormShape norm_shape(std::int64_t rows, std::int64_t n, DType t, bool residual) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n * size_of(t) / 16);
  NormShape s{};
  const bool few =
      rows < 1024 && vectors > 32 && vectors <= 512;  // latency counts: all threads a row
  s.warp = !few && vectors <= (residual ? 64 : 256);
  if (s.warp) {
    s.per = vectors <= 32 ? 1 : vectors <= 64 ? 2 : vectors <= 96 ? 3 : vectors <= 128 ? 4 : 8;
    s.threads = 128;
  } else {
    s.per = few ? 1 : residual && vectors <= 1024 ? 2 : 4;
    s.threads =
        static_cast<int>(std::min<std::int64_t>(512, ceil_div(ceil_div(vectors, s.per), 32) * 32));
  }
  // a row a team: the blocks' scheduler balances better than a loop over rows
  s.blocks = std::clamp<std::int64_t>(ceil_div(rows, s.warp ? 4 : 1), 1, 1 << 30);
  return s;
}

/// How norm_moments_sm80 spreads a row: a warp up to 2 KiB, else a block of at most 16 warps.
inline NormShape norm_moments_shape(std::int64_t rows, std::int64_t n) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n / 8);
  NormShape s{};
  const bool few = rows < 1024 && vectors > 32 && vectors <= 512;  // latency counts
  s.warp = !few && vectors <= 128;
  if (s.warp) {
    s.per = static_cast<int>(ceil_div(vectors, 32));
    s.threads = 128;
  } else {
    s.per = few ? 1 : 4;
    s.threads = static_cast<int>(ceil_div(vectors, 32 * s.per)) * 32;
  }
  s.blocks = ceil_div(rows, s.warp ? 4 : 1);
  return s;
}

/// How backward's teams are cut: warps of a team, teams of a block, vectors a thread, blocks.
struct NormTeams {
  int warps, teams, per;
  std::int64_t blocks;
};

inline NormTeams norm_teams(std::int64_t rows, std::int64_t n, DType t) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n * size_of(t) / 16);
  NormTeams s{};
  s.per = vectors <= 32 || (vectors > 64 && vectors <= 96) ? 1 : 2;
  if (rows < 256 && vectors <= 512) s.per = 1;  // latency counts: all threads a row
  s.warps = static_cast<int>(ceil_div(vectors, 32 * s.per));
  s.teams = std::clamp((s.per == 1 ? 24 : 16) / s.warps, 1, s.warps == 1 ? 24 : 15);
  const std::int64_t cards = std::max(1, multiprocessors());
  while (s.teams > 1 && rows <= cards * (s.teams - 1)) --s.teams;
  s.blocks = std::max<std::int64_t>(1, std::min(ceil_div(rows, s.teams), cards));
  return s;
}

/// Backward's rows that are longer than teams can hold: a block a row, four vectors a thread.
inline NormTeams norm_long_rows(std::int64_t rows, std::int64_t n, DType t) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n * size_of(t) / 16);
  NormTeams s{static_cast<int>(std::clamp<std::int64_t>(ceil_div(vectors, 128), 1, 16)), 1, 4, 0};
  s.blocks = std::min<std::int64_t>(rows, std::max(1, multiprocessors()) * (32 / s.warps));
  return s;
}

inline bool fits_registers(const Tensor& x) {
  return x.shape[x.rank - 1] * size_of(x.dtype) / 16 <= 4 * 512;
}

/// fn(bool_constant<warp>, integral_constant<per>) for the shape.
template <class Fn>
void dispatch_shape(const NormShape& s, Fn&& fn) {
  dispatch_at_least<1, 2, 3, 4, 8>(s.per, [&](auto per) {
    s.warp ? fn(std::true_type{}, per) : fn(std::false_type{}, per);
    return 0;
  });
}

}  // namespace rm::cuda_ops
