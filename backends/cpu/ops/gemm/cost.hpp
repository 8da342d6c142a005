// A roofline estimate: good enough to order the gemm rows of one machine, not to predict times.
#pragma once

#include <algorithm>

#include "common/parallel.hpp"
#include "ops/gemm/problem.hpp"

namespace rm::cpu::gemm {

struct Roof {
  double gflops;       // of one thread
  double overhead_ns;  // a launch
  double pack_ns;      // to pack one element of a b that is not constant
};

/// `compute_ns`: of one thread whose operands are near.
inline double roofline_ns(const GemmProblem& g, double compute_ns, double overhead_ns) {
  constexpr double kGigabytes = 14;  // a thread's share of memory bandwidth
  const double b = double(g.shared_b ? 1 : g.batch) * double(g.k) * double(g.n);
  const double rest = double(g.batch) * double(g.m) * double(g.k + g.n);
  const double memory_ns = (b + rest) * double(dtype_bytes(g.dtype[kB])) / kGigabytes;
  const double one = std::max(compute_ns, memory_ns);
  return one / std::clamp(one / 6000.0, 1.0, double(omp_get_max_threads())) + overhead_ns;
}

inline double roofline_ns(const GemmProblem& g, const Roof& roof) {
  const double b = double(g.shared_b ? 1 : g.batch) * double(g.k) * double(g.n);
  const double pack_ns = g.constant_b ? 0.0 : b * roof.pack_ns;
  return roofline_ns(g, g.flops() / roof.gflops + pack_ns, roof.overhead_ns);
}

}  // namespace rm::cpu::gemm
