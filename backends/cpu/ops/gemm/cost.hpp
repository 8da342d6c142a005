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

inline double roofline_ns(const GemmProblem& g, const Roof& roof) {
  constexpr double kGigabytes = 14;  // a thread's share of memory bandwidth
  const double bytes = static_cast<double>(dtype_bytes(g.dtype[kB]));
  const double b = double(g.shared_b ? 1 : g.batch) * double(g.k) * double(g.n);
  const double rest = double(g.batch) * double(g.m) * double(g.k + g.n);
  const double compute = g.flops() / roof.gflops + (g.constant_b ? 0.0 : b * roof.pack_ns);
  const double memory = (b + rest) * bytes / kGigabytes;
  const double one = std::max(compute, memory);
  const double threads = std::clamp(one / 6000.0, 1.0, double(omp_get_max_threads()));
  return one / threads + roof.overhead_ns;
}

}  // namespace rm::cpu::gemm
