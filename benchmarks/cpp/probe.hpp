// The read probe of the C++ benchmarks: the bound of kernels that read their operands once.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace rm::bench {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// GB/s of all threads reading 512 MiB once, each from several places at once; huge pages or not.
inline double read_rate(bool huge) {
  constexpr int64_t kBytes = 512 << 20, kPlaces = 4;
  typedef uint64_t V __attribute__((vector_size(32)));
  char* base = static_cast<char*>(std::aligned_alloc(2 << 20, kBytes));
  madvise(base, kBytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(base, 1, kBytes);
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    uint64_t total = 0;
    const double start = seconds();
#pragma omp parallel reduction(+ : total)
    {
      const int64_t share = kBytes / omp_get_num_threads() / kPlaces / 64 * 64;
      const char* from = base + omp_get_thread_num() * kPlaces * share;
      V sum[kPlaces] = {};
      for (int64_t i = 0; i < share; i += 64) {
#pragma GCC unroll 4
        for (int p = 0; p < kPlaces; ++p) {
          const V* at = reinterpret_cast<const V*>(from + p * share + i);
          sum[p] |= at[0] | at[1];
        }
      }
      for (const V& v : sum) total += v[0] + v[1] + v[2] + v[3];
    }
    const double rate = kBytes / (seconds() - start) * 1e-9;
    if (total != 42) best = std::max(best, rate);
  }
  std::free(base);
  return best;
}

}  // namespace rm::bench
