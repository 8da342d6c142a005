// Splits columns over threads and streams; the arithmetic is in isa_quant.cpp.
#include "ops/quant/linear.hpp"

#include <algorithm>
#include <cstring>

#include "common/parallel.hpp"

namespace rm::cpu::quant {
namespace {

constexpr double kThreadBytes = 48 << 10;  // of weights a thread must have to read

}  // namespace

/// f32 rows of the weight, transposed into panels.
class QuantLinear::Panels final : public gemm::PanelSource {
 public:
  explicit Panels(const QuantLinear& owner) : owner_(owner) {}

  void fill(const void* launch, int64_t begin, int64_t end, char* dst,
            char* scratch) const override {
    const QuantProblem& q = owner_.q_;
    const Operands o = operands(q, *static_cast<const rm_launch*>(launch));
    const int64_t nr = owner_.tiles_.nr, width = q.blocks() * kBlock, k = q.gemm.k;
    const int bits = q.bits == 8 ? 0 : 1;
    auto* rows = reinterpret_cast<float*>(scratch);
    Row row{};
    row.q = reinterpret_cast<uint8_t*>(rows + nr * width);
    row.scale = reinterpret_cast<uint16_t*>(row.q + q.row_bytes);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t cols = std::min(nr, q.gemm.n - panel * nr);
      if (q.tile == kTile && cols == nr) {
        auto* out = reinterpret_cast<float*>(dst);
        for (int64_t n = panel * nr; n < (panel + 1) * nr; n += kTile, out += kTile) {
          const PanelArgs tile = {
              o.q + n * q.row_bytes, o.scale + n * q.scale_row, k, q.group, out, nr};
          owner_.tile_kernels_.panel[bits](tile);
        }
        dst += k * nr * static_cast<int64_t>(sizeof(float));
        continue;
      }
      for (int64_t j = 0; j < cols; ++j) {
        const int64_t n = panel * nr + j;
        const bool lies_in_tile = q.tile == kTile && n < q.gemm.n / kTile * kTile;
        if (lies_in_tile) take_row(o, n, row);
        owner_.k_.widen[bits]({lies_in_tile ? row.q : o.q + n * q.row_bytes,
                               lies_in_tile ? row.scale : o.scale + n * q.scale_row,
                               o.zero ? o.zero + n * q.zero_row : nullptr, q.bits == 8 ? 0.f : 8.f,
                               k, q.group, rows + j * width});
      }
      owner_.tiles_.pack[gemm::kF32]({rows, 1, width, k, cols, dst, 0, 1});
      dst += k * nr * static_cast<int64_t>(sizeof(float));
    }
  }
  uint64_t scratch_bytes() const override {
    const QuantProblem& q = owner_.q_;
    const int64_t row = q.tile == kTile ? q.row_bytes + 2 * q.groups() : 0;
    return static_cast<uint64_t>(owner_.tiles_.nr * q.blocks() * kBlock) * sizeof(float) +
           static_cast<uint64_t>(row + 63) / 64 * 64;
  }

 private:
  struct Row {
    uint8_t* q;
    uint16_t* scale;
  };

  /// A row out of its tile.
  void take_row(const Operands& o, int64_t n, const Row& row) const {
    const QuantProblem& q = owner_.q_;
    const uint8_t* tile = o.q + n / kTile * kTile * q.row_bytes + n % kTile * 4;
    for (int64_t u = 0; u < q.row_bytes / 4; ++u) {
      std::memcpy(row.q + u * 4, tile + u * 4 * kTile, 4);
    }
    const uint16_t* scales = o.scale + n / kTile * kTile * q.groups() + n % kTile;
    for (int64_t g = 0; g < q.groups(); ++g) row.scale[g] = scales[g * kTile];
  }

  const QuantLinear& owner_;
};

const char* QuantLinear::reject(const QuantProblem& q) {
  const gemm::GemmProblem& g = q.gemm;
  if (g.dtype[gemm::kA] == DType::f64) return "quant_linear: f32, bf16 and f16 activations only";
  return gemm::PackedGemm::reject_scattered(g);
}

QuantLinear::QuantLinear(QuantProblem problem, const QuantSet& kernels, const TileSet& rounded,
                         const gemm::KernelSet& tiles)
    : q_(std::move(problem)),
      k_(kernels),
      tile_kernels_(rounded),
      tiles_(tiles),
      type_(tile_type(q_.gemm.dtype[gemm::kA])),
      element_bytes_(dtype_bytes(q_.gemm.dtype[gemm::kA])),
      chunks_((q_.gemm.n + tiles.nr - 1) / tiles.nr) {
  const bool few = q_.gemm.m <= kFewRows && q_.gemm.outer.empty();
  if (few && q_.x_bits == 8) {
    rounded_ = std::make_unique<TiledLinear>(q_, tile_kernels_, tiles_, type_);
    return;
  }
  if (!few || q_.tile == kTile) {
    panels_ = std::make_unique<Panels>(*this);
    many_ = std::make_unique<gemm::PackedGemm>(q_.gemm, tiles, panels_.get());
    return;
  }
  const double bytes = double(q_.gemm.n) * double(q_.blocks() * 4 * q_.bits);
  const double worth = double(std::max<int64_t>(1, q_.gemm.m)) * bytes / kThreadBytes;
  threads_ = static_cast<int>(std::clamp<double>(
      worth, 1, std::max(1.0, std::min<double>(thread_limit(), double(chunks_)))));
}

uint64_t QuantLinear::lay_out(char* base, Scratch* s) const {
  const int64_t m = q_.gemm.m, blocks = q_.blocks();
  uint64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += static_cast<uint64_t>(bytes + 63) / 64 * 64;
    return p;
  };
  s->values = take(m * blocks * 64);
  s->scales = reinterpret_cast<float*>(take(m * (blocks + kSpare) * 4));
  s->sums = reinterpret_cast<float*>(take(m * (q_.groups() + kSpare) * 4));
  s->factors = reinterpret_cast<float*>(take(kStreams * (blocks + kSpare) * 4));
  s->acc = reinterpret_cast<float*>(take(kStreams * m * tiles_.nr * 4));
  return at;
}

uint64_t QuantLinear::workspace_bytes() const {
  if (many_) return many_->workspace_bytes();
  if (rounded_) return rounded_->workspace_bytes();
  Scratch unused{};
  return lay_out(nullptr, &unused) * static_cast<uint64_t>(threads_);
}

void QuantLinear::launch(const rm_launch& l) const {
  if (q_.gemm.empty()) return;
  if (many_) {
    const Operands o = operands(q_, l);
    const void* inputs[] = {o.x, nullptr, o.bias, o.residual};
    const rm_launch inner{sizeof(rm_launch), nullptr, inputs, l.outputs, l.workspace, l.stream};
    many_->run(inner, &l);
    return;
  }
  const Operands o = operands(q_, l);
  if (rounded_) return rounded_->launch(o, l.workspace);
  Scratch unused{};
  const uint64_t bytes = lay_out(nullptr, &unused);
  parallel_ranges(chunks_, std::min(threads_, omp_get_max_threads()), 1,
                  [&](int64_t begin, int64_t end, int thread) {
                    run(o, begin, end,
                        static_cast<char*>(l.workspace) + bytes * static_cast<uint64_t>(thread));
                  });
}

void QuantLinear::run(const Operands& o, int64_t chunk0, int64_t chunk1, char* memory) const {
  Scratch s{};
  lay_out(memory, &s);
  const gemm::GemmProblem& g = q_.gemm;
  const int64_t nr = tiles_.nr;
  for (int64_t i = 0; i < g.m; ++i) {
    k_.spread[type_]({o.x + i * g.row[gemm::kA] * element_bytes_, g.col[gemm::kA], g.k, q_.blocks(),
                      q_.bits, q_.group / kBlock, q_.groups(), s.values + i * q_.blocks() * 64,
                      s.scales + i * (q_.blocks() + kSpare), s.sums + i * (q_.groups() + kSpare)});
  }
  const int64_t full = std::min(chunk1, g.n / nr) - chunk0;
  const int64_t each = full > 0 ? full / kStreams : 0;
  int64_t columns[kStreams];
  float* out[kStreams];
  for (int64_t i = 0; i < each; ++i) {
    for (int64_t j = 0; j < nr; ++j) {
      for (int t = 0; t < kStreams; ++t) {
        columns[t] = (chunk0 + t * each + i) * nr + j;
        out[t] = s.acc + t * g.m * nr + j;
      }
      dot_rows(o, s, columns, out);
    }
    for (int t = 0; t < kStreams; ++t) {
      store_columns(q_, tiles_, type_, o, s.acc + t * g.m * nr, (chunk0 + t * each + i) * nr, nr);
    }
  }
  // Fewer chunks than streams are left, or columns than a chunk: neighbours are the streams.
  for (int64_t chunk = chunk0 + each * kStreams; chunk < chunk1; ++chunk) {
    const int64_t n0 = chunk * nr, cols = std::min(nr, g.n - n0);
    for (int64_t j = 0; j < cols; j += kStreams) {
      for (int t = 0; t < kStreams; ++t) {
        // Streams behind the last column read it again, for a result that nobody looks at.
        const int64_t column = std::min(j + t, cols - 1);
        columns[t] = n0 + column;
        out[t] = j + t < cols ? s.acc + column : s.acc + t * g.m * nr;
      }
      dot_rows(o, s, columns, out);
    }
    store_columns(q_, tiles_, type_, o, s.acc, n0, cols);
  }
}

/// All rows of x with four columns; out[t] is the first row's element of column t.
void QuantLinear::dot_rows(const Operands& o, const Scratch& s, const int64_t* columns,
                           float* const* out) const {
  DotArgs a{};
  a.zero_point = q_.bits == 8 ? 0.f : 8.f;
  a.blocks = q_.blocks(), a.groups = q_.groups(), a.group_blocks = q_.group / kBlock;
  a.factors = s.factors;
  for (int t = 0; t < kStreams; ++t) {
    a.w[t] = o.q + columns[t] * q_.row_bytes;
    a.scale[t] = o.scale + columns[t] * q_.scale_row;
    a.zero[t] = o.zero ? o.zero + columns[t] * q_.zero_row : nullptr;
  }
  for (int64_t i = 0; i < q_.gemm.m; ++i) {
    a.values = s.values + i * a.blocks * 64;
    a.scales = s.scales + i * (a.blocks + kSpare);
    a.sums = s.sums + i * (a.groups + kSpare);
    for (int t = 0; t < kStreams; ++t) a.out[t] = out[t] + i * tiles_.nr;
    k_.dot[q_.bits == 8 ? 0 : 1](a);
  }
}

}  // namespace rm::cpu::quant
