// Splits work over OpenMP threads; libgomp is the pool torch uses, so torch.set_num_threads
// governs.  Row sources only: never include it from an ISA source.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace rm::cpu {

/// Waking a thread costs a few microseconds: each one must have this much to do.
inline constexpr double kWorthThreadNs = 20000;

/// Most threads a launch will ever use; workspaces are sized by it at prepare time.
inline int thread_limit() {
  // Asked once: libgomp answers through memory that all threads share, which is a race.
  static const int processors = omp_get_num_procs();
  return std::max(omp_get_max_threads(), processors);
}

inline int threads_for(double work_ns, int64_t tasks, int limit) {
  const double worth = work_ns / kWorthThreadNs;
  const int64_t most = std::min<int64_t>({tasks, limit, omp_get_max_threads()});
  if (worth < 2 || most < 2) return 1;
  return static_cast<int>(std::min<double>(worth, static_cast<double>(most)));
}

/// body(begin, end, thread) over [0, n) in equal shares whose inner limits are multiples of grain.
template <class Body>
void parallel_ranges(int64_t n, int threads, int64_t grain, Body&& body) {
  if (threads <= 1) {
    if (n > 0) body(int64_t{0}, n, 0);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t grains = (n + grain - 1) / grain;
    const int64_t begin = std::min(n, grains * me / team * grain);
    const int64_t end = std::min(n, grains * (me + 1) / team * grain);
    if (begin < end) body(begin, end, static_cast<int>(me));
  }
}

/// body(task, thread), handed out one by one: for tasks of unequal length.
template <class Body>
void parallel_tasks(int64_t tasks, int threads, Body&& body) {
  if (threads <= 1) {
    for (int64_t t = 0; t < tasks; ++t) body(t, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t t = 0; t < tasks; ++t) body(t, omp_get_thread_num());
}

/// body(task, next, thread), handed out one by one; `next` is what the thread does afterwards, or -1:
/// for tasks that fetch what the next one reads.
template <class Body>
void parallel_tasks_ahead(int64_t tasks, int threads, Body&& body) {
  std::atomic<int64_t> taken{0};
  const auto work = [&](int thread) {
    int64_t next = taken.fetch_add(1, std::memory_order_relaxed);
    while (next < tasks) {
      const int64_t task = next;
      next = taken.fetch_add(1, std::memory_order_relaxed);
      body(task, next < tasks ? next : -1, thread);
    }
  };
  if (threads <= 1) return work(0);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
}

}  // namespace rm::cpu
