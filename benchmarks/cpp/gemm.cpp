// gemm rows at transformer sizes: GFLOP/s, share of the GEMM probe, and GB/s of weights for few
// rows.
//
//   gemm_bench [f32|bf16|f16] [threads] [m,m,...] [encoder|decoder]
//
// Weights are rotated through more copies than the last cache holds, as in a model. Rows run
// interleaved; medians of the rounds are printed. The probe is the best of oneDNN (prepacked) and
// our own kernel on 2048^3 in f32, taken in the same run; the peak is a loop of multiply-adds in
// registers.
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <sstream>

#include "../../tests/cpp/cpu_gemm/harness.hpp"
#include "probe.hpp"

namespace {
using namespace gemm_test;

/// Processor time for one thread (a busy machine then disturbs little), wall time for more.
double now() {
  if (omp_get_max_threads() == 1) {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

#if defined(__x86_64__)
/// Twelve independent chains of 8-wide multiply-adds; returns FLOPs done.
__attribute__((target("avx2,fma"), noinline)) double fma_loop(int64_t steps, float* sink) {
  typedef float V __attribute__((vector_size(32)));
  V acc[12], x = V{} + 1e-3f, y = V{} + 0.999f;
  for (int i = 0; i < 12; ++i) acc[i] = V{} + float(i);  // else the compiler merges the chains
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (V& a : acc) a = __builtin_ia32_vfmaddps256(a, y, x);
  }
  for (V& a : acc) *sink += a[0];
  return double(steps) * 12 * 8 * 2;
}

double fma_peak(int threads) {
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    double flops = 0;
    const double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
      float sink = 0;
      flops += fma_loop(4000000, &sink);
      if (sink == 42.f) std::puts("");
    }
    best = std::max(best, flops / (now() - start) * 1e-9);
  }
  return best;
}
#endif

void randomize(Tensor& t) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.elements; ++i) set(t.dtype, t.data(), i, normal(random) * 0.05);
}

/// Seconds a call of every row, over rotating copies of the weight.
struct Contest {
  std::vector<std::string> names;
  std::vector<double> seconds;
};

Contest contest(DLDataType type, int64_t m, int64_t n, int64_t k, const std::string& activation,
                int rounds, double cold_bytes, bool unpacked) {
  Tensor a(type, {m, k}), b(type, {n, k}), bias(type, {n}), c(type, {m, n});
  randomize(a), randomize(b), randomize(bias);
  const Problem problem{&a, &b, &bias, nullptr, &c, true, activation};
  std::vector<std::unique_ptr<Prepared>> candidates;
  std::vector<std::vector<Memory>> copies;
  Contest result;
  const auto add = [&](const rm_kernel& row, bool pack_weights) {
    Problem own = problem;
    own.pack_weights = pack_weights;
    auto prepared = std::make_unique<Prepared>(row, own);
    if (!prepared->supported()) return;
    // Rows that do not pack share one set of copies of the weight as it lies.
    const bool packs = prepared->packed_bytes() != 0;
    const uint64_t bytes = packs ? prepared->packed_bytes() : uint64_t(n * k) * type.bits / 8;
    copies.emplace_back();
    for (int i = 0; i < std::max(1, int(cold_bytes / double(bytes))); ++i) {
      copies.back().push_back(allocate(bytes));
      std::memcpy(copies.back().back().get(), packs ? prepared->packed() : b.data(), bytes);
    }
    candidates.push_back(std::move(prepared));
    result.names.push_back(text(row.name) + (pack_weights ? "" : " unpacked"));
  };
  for (const rm_kernel* row : gemm_rows()) {
    const std::string name = text(row->name);
    if (name == "gemm_naive" || name.find("baseline") != std::string::npos) continue;
    add(*row, true);
    if (unpacked && name.find("direct") == std::string::npos) add(*row, false);
  }
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = 0; round < rounds + 1; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      const double start = now();
      int calls = 0;
      do {
        for (const Memory& copy : copies[i]) candidates[i]->launch(copy.get());
        calls += int(copies[i].size());
      } while (now() - start < 0.02);
      if (round > 0) times[i].push_back((now() - start) / calls);
    }
  }
  for (auto& t : times) result.seconds.push_back(median(t));
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string type_name = argc > 1 ? argv[1] : "f32";
  const DLDataType type = type_name == "bf16" ? kBF16 : type_name == "f16" ? kF16 : kF32;
  if (argc > 2 && std::atoi(argv[2]) > 0) omp_set_num_threads(std::atoi(argv[2]));
  std::vector<int64_t> ms = {1, 4, 16, 32, 64, 128, 512};
  if (argc > 3) {
    ms.clear();
    std::stringstream list(argv[3]);
    for (std::string item; std::getline(list, item, ',');) ms.push_back(std::atoll(item.c_str()));
  }
  const int threads = omp_get_max_threads();
#if defined(__x86_64__)
  if (__builtin_cpu_supports("fma")) {
    std::printf("AVX2 multiply-add peak, %d threads: %.1f GFLOP/s\n", threads, fma_peak(threads));
  }
#endif
  const Contest probe = contest(kF32, 2048, 2048, 2048, "none", 3, 1, false);
  double best = 0;
  for (size_t i = 0; i < probe.names.size(); ++i) {
    const double rate = 2.0 * 2048 * 2048 * 2048 / probe.seconds[i] * 1e-9;
    std::printf("probe f32 2048^3 %-22s %.1f GFLOP/s\n", probe.names[i].c_str(), rate);
    best = std::max(best, rate);
  }
  struct Layer {
    int64_t n, k;
    const char* activation;
  };
  const std::vector<Layer> encoder = {{768, 768, "none"},  {2304, 768, "none"}, {3072, 768, "gelu"},
                                      {768, 3072, "none"}, {384, 384, "none"},  {1152, 384, "none"},
                                      {1536, 384, "gelu"}, {384, 1536, "none"}};
  const std::vector<Layer> decoder = {
      {1024, 1024, "none"}, {512, 1024, "none"}, {2816, 1024, "silu"}, {1024, 2816, "none"},
      {768, 768, "none"},   {768, 2048, "none"}, {32000, 1024, "none"}};
  const bool decoding = argc > 4 && std::string(argv[4]) == "decoder";
  for (int64_t m : ms) {
    std::printf("read probe: %.1f GB/s, without huge pages %.1f GB/s\n", rm::bench::read_rate(true),
                rm::bench::read_rate(false));
    for (const Layer& layer : decoding ? decoder : encoder) {
      const Contest r = contest(type, m, layer.n, layer.k, layer.activation, 5,
                                decoding ? 256e6 : 64e6, decoding);
      std::printf("%s %4lld x %4lld x %4lld %-5s", type_name.c_str(), (long long)m,
                  (long long)layer.n, (long long)layer.k, layer.activation);
      for (size_t i = 0; i < r.names.size(); ++i) {
        const double rate = 2e-9 * double(m * layer.n * layer.k) / r.seconds[i];
        const double stream = double(layer.n * layer.k) * type.bits / 8 / r.seconds[i] * 1e-9;
        std::printf(" | %s %7.1f us %6.1f GFLOP/s (%.2f) %5.1f GB/s", r.names[i].c_str() + 5,
                    r.seconds[i] * 1e6, rate, rate / best, stream);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}
