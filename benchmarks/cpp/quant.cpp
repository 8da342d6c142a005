// quant_linear at decoder sizes: GB/s of stored weights, share of the read probe.
//
//   quant_bench [8|4] [threads] [m,m,...] [group] [MiB] [8|16] [row,row,...] [NxK,NxK,...]
//
// 8 or 16 is what activations are rounded to. Rows are parts of names of kernel rows, timed one after the
// other at each size; without them ("") it is the first row that takes the problem.
//
// Weights are random bytes, rotated through 200 MiB, more than the last cache holds; with few MiB
// they stay in a cache, which shows what the arithmetic alone takes.
#include <omp.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <string>

#include "../../tests/cpp/cpu_gemm/harness.hpp"
#include "probe.hpp"

namespace {
using namespace gemm_test;
constexpr DLDataType kU8{kDLUInt, 8, 1};

struct Layer {
  int64_t n, k;
};

void randomize(Tensor& t, double scale) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.elements; ++i) {
    if (t.dtype.bits == 8) {
      static_cast<uint8_t*>(t.data())[i] = static_cast<uint8_t>(random());
    } else {
      set(t.dtype, t.data(), i, normal(random) * scale);
    }
  }
}

rm_attr attribute(std::string_view name, int64_t value) {
  return {sizeof(rm_attr), {name.data(), name.size()}, RM_ATTR_INT, 0, value, 0, {}, 0, 0, 0};
}

/// The first row with `name` in its own that takes the problem, or null: rows of wider instruction
/// sets come first.
const rm_kernel* best_row(const rm_problem& problem, const std::string& name) {
  const rm_kernels& table = plugin_rows();
  for (size_t i = 0; i < table.count; ++i) {
    const auto* row = reinterpret_cast<const rm_kernel*>(reinterpret_cast<const char*>(table.rows) +
                                                         i * table.row_stride);
    if (text(row->op) != "quant_linear" || text(row->name).find(name) == std::string::npos) continue;
    if (row->supports(&problem, nullptr, nullptr)) return row;
  }
  return nullptr;
}

struct Timing {
  std::string row;
  double seconds;  // median of a launch; 0: no such row takes the problem
};

/// On bf16 activations.
Timing measure(int64_t bits, int64_t group, int64_t m, Layer layer, int64_t total, int64_t x_bits,
               const std::string& name) {
  const int64_t row_bytes = (layer.k + 63) / 64 * 8 * bits, groups = (layer.k + group - 1) / group;
  Tensor x(kBF16, {m, layer.k}), y(kBF16, {m, layer.n});
  randomize(x, 1);
  const int64_t bytes = layer.n * (row_bytes + 2 * groups);
  const int copies = static_cast<int>(std::max<int64_t>(1, total / bytes));
  std::vector<Tensor> weights, scales;
  for (int i = 0; i < copies; ++i) {
    weights.emplace_back(bits == 8 ? kI8 : kU8, std::vector<int64_t>{layer.n, row_bytes});
    scales.emplace_back(kF16, std::vector<int64_t>{layer.n, groups});
    randomize(weights.back(), 1), randomize(scales.back(), 0.01);
  }
  const rm_attr attrs[] = {attribute("bits", bits), attribute("group", group),
                           attribute("tile", x_bits == 8 ? 8 : 1), attribute("x_bits", x_bits)};
  const rm_tensor* inputs[] = {&x.view, &weights[0].view, &scales[0].view};
  const rm_tensor* outputs[] = {&y.view};
  const rm_problem problem{sizeof(rm_problem),
                           {"quant_linear", 12},
                           inputs,
                           3,
                           outputs,
                           1,
                           attrs,
                           4,
                           sizeof(rm_attr),
                           6};
  const rm_kernel* found = best_row(problem, name);
  if (!found) return {name, 0};
  const rm_kernel& row = *found;
  rm_kernel_state* state = nullptr;
  check(row.prepare(&problem, nullptr, 0, &state));
  const Memory workspace = allocate(row.workspace(state));
  const int repeats = std::max(1, 20 / copies);
  std::vector<double> times;
  for (int round = 0; round < 6; ++round) {
    const double start = rm::bench::seconds();
    for (int i = 0; i < copies * repeats; ++i) {
      const void* in[] = {x.data(), weights[size_t(i % copies)].data(),
                          scales[size_t(i % copies)].data()};
      void* out[] = {y.data()};
      const rm_launch launch{sizeof(rm_launch), state, in, out, workspace.get(), nullptr};
      check(row.launch(&launch));
    }
    if (round > 0) times.push_back((rm::bench::seconds() - start) / (copies * repeats));
  }
  row.release(state);
  std::sort(times.begin(), times.end());
  return {text(row.name), times[times.size() / 2]};
}

void print(int64_t bits, int64_t group, int64_t m, Layer layer, double probe, const Timing& t) {
  std::printf("int%lld %4lld x %5lld x %4lld: ", (long long)bits, (long long)m, (long long)layer.n,
              (long long)layer.k);
  if (t.seconds == 0) {
    std::printf("no row %s takes it\n", t.row.c_str());
    return;
  }
  const double bytes = double(layer.n) * double((layer.k + 63) / 64 * 8 * bits +
                                                (layer.k + group - 1) / group * 2);
  std::printf("%8.1f us %5.1f GB/s (%.2f of the read probe), %6.1f GFLOP/s  %s\n", t.seconds * 1e6,
              bytes / t.seconds * 1e-9, bytes / t.seconds * 1e-9 / probe,
              2e-9 * double(m * layer.n * layer.k) / t.seconds, t.row.c_str());
}

std::vector<std::string> parts(const char* list) {
  std::vector<std::string> out;
  std::stringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');) out.push_back(item);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t bits = argc > 1 ? std::atoi(argv[1]) : 8;
  if (argc > 2 && std::atoi(argv[2]) > 0) omp_set_num_threads(std::atoi(argv[2]));
  std::vector<int64_t> ms = {1, 8, 512};
  if (argc > 3) {
    ms.clear();
    for (const std::string& item : parts(argv[3])) ms.push_back(std::atoll(item.c_str()));
  }
  const int64_t group = argc > 4 ? std::atoi(argv[4]) : 32;
  const int64_t total = (argc > 5 ? std::atoll(argv[5]) : 200) << 20;
  const int64_t x_bits = argc > 6 ? std::atoi(argv[6]) : 8;
  std::vector<std::string> rows = parts(argc > 7 ? argv[7] : "");
  if (rows.empty()) rows = {""};
  std::vector<Layer> layers;
  for (const std::string& size :
       parts(argc > 8 ? argv[8] : "1024x1024,512x1024,2816x1024,1024x2816,768x768,2048x768,32000x1024")) {
    layers.push_back({std::atoll(size.c_str()), std::atoll(size.c_str() + size.find('x') + 1)});
  }
  for (int64_t m : ms) {
    for (const Layer& layer : layers) {
      const double probe = rm::bench::read_rate(true);
      for (const std::string& row : rows) print(bits, group, m, layer, probe, measure(bits, group, m, layer, total, x_bits, row));
      std::fflush(stdout);
    }
  }
}
