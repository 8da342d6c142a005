// Packs weights into panels, finds the places of x that a tile meets, and shares tiles over threads.
#include "ops/conv/direct.hpp"

#include <algorithm>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"

namespace rm::cpu::conv {
namespace {

constexpr double kNsPerFlop = 0.03;  // of one thread: decides how many are worth waking

uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

const DirectKernels& kernels_of(const DirectSet& set, DType type) {
  return type == DType::f32 ? set.f32 : type == DType::bf16 ? set.bf16 : set.f16;
}

int64_t meeting(const ConvProblem& c, size_t axis, int64_t at, int64_t k) {
  int64_t i = at * c.stride[axis] - c.begin[axis] + k * c.dilation[axis];
  if (c.transposed) {
    const int64_t far = at + c.begin[axis] - k * c.dilation[axis];
    i = far >= 0 && far % c.stride[axis] == 0 ? far / c.stride[axis] : -1;
  }
  return i >= 0 && i < c.x[axis] ? i : -1;
}

}  // namespace

const char* DirectConv::reject(const ConvProblem& c) {
  if (!is_float32_class(c.dtype)) return "direct: f32, bf16 and f16 only";
  for (Operand o : {kX, kResidual, kY}) {
    const int64_t channels = o == kX ? c.from : c.to;
    if (c.given[o] && channels > 1 && c.step[o][1] != 1) return "direct: channels do not lie last";
  }
  if (c.given[kBias] && c.to > 1 && c.step[kBias][0] != 1) return "direct: strides of the bias";
  return nullptr;
}

DirectConv::DirectConv(ConvProblem problem, const DirectSet& set)
    : c_(std::move(problem)), set_(set), k_(kernels_of(set, c_.dtype)) {
  depthwise_ = c_.from_each() == 1 && c_.to_each() == 1;
  bytes_ = dtype_bytes(c_.dtype);
  lanes_ = static_cast<int64_t>(set.width) * set.vectors;
  panels_ = (c_.to_each() + lanes_ - 1) / lanes_;
  pixels_ = places() >= kTilePixels ? kTilePixels : 1;
  tiles_ = (places() + pixels_ - 1) / pixels_;
  for (size_t a = 0; a < 3; ++a) {
    for (int64_t at = 0; at < c_.y[a]; ++at) {
      for (int64_t k = 0; k < c_.k[a]; ++k) {
        const int64_t i = meeting(c_, a, at, k);
        meets_[a].push_back(i < 0 ? -1 : i * c_.step[kX][2 + a] * bytes_);
      }
    }
  }
  zeros_.assign(static_cast<size_t>((depthwise_ ? c_.from : c_.from_each()) * bytes_), 0);
  layout_ = "conv-direct-" + std::to_string(set.width) + (depthwise_ ? "-depthwise" : "-panels") +
            std::to_string(c_.groups) + (c_.transposed ? "-transposed" : "");
}

// A last panel that is not full has as many vectors as it needs.
static int64_t vectors_of(const DirectSet& set, int64_t channels, int64_t panel, int64_t lanes) {
  const int64_t left = std::min(lanes, channels - panel * lanes);
  return (left + set.width - 1) / set.width;
}

uint64_t DirectConv::packed_bytes() const {
  if (depthwise_) return static_cast<uint64_t>(taps() * c_.from) * sizeof(float);
  int64_t lanes = 0;
  for (int64_t p = 0; p < panels_; ++p) lanes += vectors_of(set_, c_.to_each(), p, lanes_);
  return static_cast<uint64_t>(c_.groups * lanes * set_.width * taps() * c_.from_each()) *
         sizeof(float);
}

void DirectConv::pack(const void* src, void* dst) const {
  auto* out = static_cast<float*>(dst);
  visit(c_.dtype, [&](auto type) {
    using T = decltype(type);
    const auto& s = c_.step[kW];
    const auto weight = [&](int64_t g, int64_t o, int64_t i, int64_t tap) {
      if (o >= c_.to_each()) return 0.f;
      const int64_t channel = c_.transposed ? (g * c_.from_each() + i) * s[0] + o * s[1]
                                            : (g * c_.to_each() + o) * s[0] + i * s[1];
      const int64_t k2 = tap % c_.k[2], k1 = tap / c_.k[2] % c_.k[1], k0 = tap / (c_.k[2] * c_.k[1]);
      return static_cast<float>(
          get(static_cast<const T*>(src)[channel + k0 * s[2] + k1 * s[3] + k2 * s[4]]));
    };
    if (depthwise_) {
      for (int64_t tap = 0; tap < taps(); ++tap) {
        for (int64_t g = 0; g < c_.groups; ++g) *out++ = weight(g, 0, 0, tap);
      }
      return;
    }
    for (int64_t g = 0; g < c_.groups; ++g) {
      for (int64_t p = 0; p < panels_; ++p) {
        const int64_t lanes = vectors_of(set_, c_.to_each(), p, lanes_) * set_.width;
        for (int64_t tap = 0; tap < taps(); ++tap) {
          for (int64_t i = 0; i < c_.from_each(); ++i) {
            for (int64_t o = 0; o < lanes; ++o) *out++ = weight(g, p * lanes_ + o, i, tap);
          }
        }
      }
    }
  });
}

/// Pointers of the taps, then the sums.
uint64_t DirectConv::thread_bytes() const {
  const auto pointers = static_cast<uint64_t>(taps() * pixels_) * sizeof(void*);
  const auto sums = static_cast<uint64_t>(depthwise_ ? c_.from : pixels_ * lanes_) * sizeof(float);
  return aligned(pointers) + aligned(sums);
}

uint64_t DirectConv::workspace_bytes() const {
  return thread_bytes() * static_cast<uint64_t>(thread_limit()) +
         (c_.constant_w ? 0 : aligned(packed_bytes()));
}

int64_t DirectConv::offset(Operand o, int64_t n, int64_t place) const {
  const auto& s = c_.step[o];
  const int64_t y2 = place % c_.y[2], y1 = place / c_.y[2] % c_.y[1],
                y0 = place / (c_.y[2] * c_.y[1]);
  return (n * s[0] + y0 * s[2] + y1 * s[3] + y2 * s[4]) * bytes_;
}

// taps[tap * pixels + pixel]; `x` is the first channel of the sample.
void DirectConv::find_taps(const char* x, int64_t place, int64_t pixel, int64_t pixels,
                           const void** taps) const {
  const int64_t y2 = place % c_.y[2], y1 = place / c_.y[2] % c_.y[1],
                y0 = place / (c_.y[2] * c_.y[1]);
  const int64_t* m0 = meets_[0].data() + y0 * c_.k[0];
  const int64_t* m1 = meets_[1].data() + y1 * c_.k[1];
  const int64_t* m2 = meets_[2].data() + y2 * c_.k[2];
  const void** out = taps + pixel;
  for (int64_t k0 = 0; k0 < c_.k[0]; ++k0) {
    for (int64_t k1 = 0; k1 < c_.k[1]; ++k1) {
      for (int64_t k2 = 0; k2 < c_.k[2]; ++k2, out += pixels) {
        const bool inside = m0[k0] >= 0 && m1[k1] >= 0 && m2[k2] >= 0;
        *out = inside ? x + m0[k0] + m1[k1] + m2[k2] : zeros_.data();
      }
    }
  }
}

void DirectConv::store(const rm_launch& l, int64_t n, int64_t place, int64_t channel,
                       int64_t channels, const float* sums) const {
  const auto at = [&](Operand o, const void* base) {
    return static_cast<const char*>(base) + offset(o, n, place) + channel * bytes_;
  };
  Finish f{};
  f.sums = sums;
  f.bias = c_.given[kBias] ? static_cast<const char*>(l.inputs[kBias]) + channel * bytes_ : nullptr;
  f.residual = c_.given[kResidual] ? at(kResidual, l.inputs[kResidual]) : nullptr;
  f.y = const_cast<char*>(at(kY, l.outputs[0]));
  f.channels = channels;
  f.activation = c_.activation;
  k_.finish(f);
}

// Tasks count tiles of a panel, panels of a group, groups, samples.
void DirectConv::run_tile(const rm_launch& l, const float* weights, int64_t task,
                          char* scratch) const {
  const int64_t tile = task % tiles_, panel = task / tiles_ % panels_,
                group = task / (tiles_ * panels_) % c_.groups,
                n = task / (tiles_ * panels_ * c_.groups);
  const auto** taps_at = reinterpret_cast<const void**>(scratch);
  auto* sums = reinterpret_cast<float*>(
      scratch + aligned(static_cast<uint64_t>(taps() * pixels_) * sizeof(void*)));
  const char* x = static_cast<const char*>(l.inputs[kX]) +
                  (n * c_.step[kX][0] + group * c_.from_each()) * bytes_;
  const int64_t first = tile * pixels_, last = std::min(first + pixels_, places());
  for (int64_t p = 0; p < pixels_; ++p) {
    find_taps(x, std::min(first + p, last - 1), p, pixels_, taps_at);
  }
  const int64_t vectors = vectors_of(set_, c_.to_each(), panel, lanes_);
  const int64_t depth = taps() * c_.from_each();
  int64_t before = 0;  // lanes in front of this panel
  for (int64_t p = 0; p < panels_; ++p) {
    const int64_t lanes = vectors_of(set_, c_.to_each(), p, lanes_) * set_.width;
    before += lanes * (group + (p < panel ? 1 : 0));
  }
  const Tile t{taps_at, weights + before * depth, taps(), c_.from_each(), sums};
  (pixels_ == kTilePixels ? k_.tiles : k_.rows)[vectors - 1](t);
  const int64_t channel = panel * lanes_;
  for (int64_t p = first; p < last; ++p) {
    store(l, n, p, group * c_.to_each() + channel, std::min(lanes_, c_.to_each() - channel),
          sums + (p - first) * vectors * set_.width);
  }
}

// Tasks count rows of places.
void DirectConv::run_depthwise(const rm_launch& l, const float* weights, int64_t task,
                               char* scratch) const {
  const int64_t rows = c_.y[0] * c_.y[1], n = task / rows;
  const auto** taps_at = reinterpret_cast<const void**>(scratch);
  auto* sums = reinterpret_cast<float*>(
      scratch + aligned(static_cast<uint64_t>(taps() * pixels_) * sizeof(void*)));
  const char* x = static_cast<const char*>(l.inputs[kX]) + n * c_.step[kX][0] * bytes_;
  for (int64_t y2 = 0; y2 < c_.y[2]; ++y2) {
    const int64_t place = task % rows * c_.y[2] + y2;
    find_taps(x, place, 0, 1, taps_at);
    k_.depthwise(taps_at, weights, c_.from, taps(), c_.from, sums);
    store(l, n, place, 0, c_.to, sums);
  }
}

void DirectConv::launch(const rm_launch& l) const {
  if (c_.batch * places() * c_.to == 0) return;
  const auto* weights = static_cast<const float*>(l.inputs[kW]);
  char* scratch = static_cast<char*>(l.workspace);
  if (!c_.constant_w) {
    pack(l.inputs[kW], scratch);
    weights = reinterpret_cast<const float*>(scratch);
    scratch += aligned(packed_bytes());
  }
  const int64_t tasks = c_.batch * (depthwise_ ? c_.y[0] * c_.y[1] : c_.groups * panels_ * tiles_);
  const int threads = threads_for(kNsPerFlop * c_.flops(), tasks, thread_limit());
  parallel_ranges(tasks, threads, 1, [&](int64_t begin, int64_t end, int thread) {
    char* own = scratch + thread_bytes() * static_cast<uint64_t>(thread);
    for (int64_t t = begin; t < end; ++t) {
      depthwise_ ? run_depthwise(l, weights, t, own) : run_tile(l, weights, t, own);
    }
  });
}

}  // namespace rm::cpu::conv
