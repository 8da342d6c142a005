// Attention of one query over a static cache: GB/s of keys and values, share of the read probe.
//
//   sdpa_bench [f32|bf16|f16] [threads]
//
// Caches are rotated through more memory than the last cache holds, as layers do. The mask is a
// bool [1,1,1,C] of which the first `attended` keys are true: bytes of those alone are counted.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "../../tests/cpp/cpu_gemm/harness.hpp"
#include "probe.hpp"

namespace {
using namespace gemm_test;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void randomize(Tensor& t) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.elements; ++i) set(t.dtype, t.data(), i, normal(random));
}

struct Shape {
  int64_t heads, groups, queries, capacity, attended, size;
};

/// Median seconds of a launch.
double measure(const rm_kernel& row, DLDataType type, const Shape& s) {
  constexpr DLDataType kBool{kDLBool, 8, 1};
  Tensor q(type, {1, s.heads, s.queries, s.size}), o(type, {1, s.heads, s.queries, s.size});
  Tensor mask(kBool, {1, s.heads, s.queries, s.capacity}, {0, 0, s.capacity, 1});
  randomize(q);
  for (int64_t i = 0; i < mask.elements; ++i) {
    static_cast<uint8_t*>(mask.data())[i] =
        i % s.capacity < s.attended - s.queries + 1 + i / s.capacity;
  }
  const int64_t bytes = s.groups * s.capacity * s.size * type.bits / 8;
  const int copies = static_cast<int>(std::max<int64_t>(2, (200 << 20) / (2 * bytes)));
  std::vector<Tensor> keys, values;
  for (int i = 0; i < copies; ++i) {
    for (auto* list : {&keys, &values}) {
      list->emplace_back(type, std::vector<int64_t>{1, s.groups, s.capacity, s.size});
      randomize(list->back());
    }
  }
  const rm_tensor* inputs[] = {&q.view, &keys[0].view, &values[0].view, &mask.view};
  const rm_tensor* outputs[] = {&o.view};
  const rm_problem problem{
      sizeof(rm_problem), {"sdpa", 4}, inputs, 4, outputs, 1, nullptr, 0, sizeof(rm_attr), 0};
  rm_kernel_state* state = nullptr;
  check(row.prepare(&problem, nullptr, 0, &state));
  const Memory workspace = allocate(row.workspace(state));
  std::vector<double> times;
  for (int round = 0; round < 8; ++round) {
    const double start = now();
    for (int i = 0; i < copies; ++i) {
      const void* in[] = {q.data(), keys[size_t(i)].data(), values[size_t(i)].data(), mask.data()};
      void* out[] = {o.data()};
      const rm_launch launch{sizeof(rm_launch), state, in, out, workspace.get(), nullptr};
      check(row.launch(&launch));
    }
    if (round > 0) times.push_back((now() - start) / copies);
  }
  row.release(state);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const std::string type_name = argc > 1 ? argv[1] : "f32";
  const DLDataType type = type_name == "bf16" ? kBF16 : type_name == "f16" ? kF16 : kF32;
  if (argc > 2 && std::atoi(argv[2]) > 0) omp_set_num_threads(std::atoi(argv[2]));
  const Shape shapes[] = {{16, 8, 1, 4096, 4096, 64},  {16, 8, 1, 4096, 512, 64},
                          {12, 12, 1, 4096, 4096, 64}, {32, 8, 1, 4096, 4096, 128},
                          {16, 8, 1, 512, 128, 64},    {16, 8, 4, 4096, 4096, 64},
                          {16, 8, 512, 1024, 512, 64}};
  const rm_kernel* best = nullptr;
  const rm_kernels& table = plugin_rows();
  for (size_t i = 0; i < table.count && !best; ++i) {
    const auto* row = reinterpret_cast<const rm_kernel*>(reinterpret_cast<const char*>(table.rows) +
                                                         i * table.row_stride);
    const char* isa = __builtin_cpu_supports("avx512bw") ? "_avx512" : "_avx2";
    if (text(row->op) == "sdpa" && text(row->name).find(isa) != std::string::npos) best = row;
  }
  for (const Shape& s : shapes) {
    const double probe = rm::bench::read_rate(true);
    const double seconds = measure(*best, type, s);
    const double bytes = 2.0 * double(s.groups * s.attended * s.size) * type.bits / 8;
    std::printf(
        "%s H %lld G %lld S %lld C %lld attended %lld D %lld: %8.1f us %5.1f GB/s "
        "(%.2f of the read probe), %5.1f GFLOP/s\n",
        type_name.c_str(), (long long)s.heads, (long long)s.groups, (long long)s.queries,
        (long long)s.capacity, (long long)s.attended, (long long)s.size, seconds * 1e6,
        bytes / seconds * 1e-9, bytes / seconds * 1e-9 / probe,
        4e-9 * double(s.heads * s.queries * s.attended * s.size) / seconds);
    std::fflush(stdout);
  }
}
