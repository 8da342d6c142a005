// Which rows and panels a thread takes, in which order, and where their operands lie.
#include "ops/conv/packed.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/parallel.hpp"

namespace rm::cpu::conv {
namespace {

constexpr int64_t kBlockRows = 256;         // of partial sums: 32 KiB at 32 channels
constexpr int64_t kBlockBytes = 384 << 10;  // of x, read for every panel: second-level cache
constexpr int64_t kNearBytes = 320 << 10;   // of weights, read for every tile: second-level cache
constexpr int64_t kPanelBytes = 160 << 10;  // longer panels are read in blocks of channels
constexpr int64_t kAliasedRows = 7;         // of a tile, where they fight for one set of the cache
constexpr double kNsPerFlop = 1.0 / 150;    // of one thread
constexpr double kNsPerByte = 0.03;         // beside the arithmetic

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
uint64_t floats(int64_t count) {
  return static_cast<uint64_t>(divide_up(count, 16)) * 16 * sizeof(float);
}
/// Rows that lie a multiple of 4 KiB apart share the sets of the first-level cache.
bool aliased(int64_t stride) { return stride * int64_t{sizeof(float)} % 4096 == 0; }

}  // namespace

const char* PackedConv::reject(const ConvProblem& c) {
  if (c.dtype != DType::f32) return "packed: f32 only";
  if (c.groups != 1 || c.transposed) return "packed: one group, not transposed";
  for (Operand o : {kX, kResidual, kY}) {
    const int64_t channels = o == kX ? c.from : c.to;
    if (c.given[o] && channels > 1 && c.step[o][1] != 1) return "packed: channels do not lie last";
  }
  if (c.given[kBias] && c.to > 1 && c.step[kBias][0] != 1) return "packed: strides of the bias";
  return nullptr;
}

PackedConv::PackedConv(ConvProblem problem, const gemm::KernelSet& tiles, const PackedSet& set)
    : c_(std::move(problem)), tiles_(tiles), set_(set) {
  panels_ = divide_up(c_.to, tiles_.nr);
  layout_ = "conv-packed-n" + std::to_string(tiles_.nr);
  if (c_.empty()) return;
  drop_strides();
  plan_lines();
  plan_rows();
  plan_blocks();
}

/// Where a kernel has one element, only the places that its stride hits are there.
void PackedConv::drop_strides() {
  for (size_t a = 0; a < 3; ++a) {
    if (c_.k[a] != 1 || c_.begin[a] != 0 || (c_.y[a] - 1) * c_.stride[a] >= c_.x[a]) continue;
    c_.x[a] = c_.y[a];
    c_.step[kX][2 + a] *= c_.stride[a];
    c_.stride[a] = 1;
  }
}

/// Elements between neighbouring places.
int64_t PackedConv::pitch(Operand o) const {
  for (const size_t axis : {4, 3, 2}) {
    if (c_.y[axis - 2] != 1) return c_.step[o][axis];
  }
  return c_.step[o][0];
}

/// Whether lines follow each other without a gap, over all images.
bool PackedConv::follows(Operand o) const {
  if (!c_.given[o]) return true;
  int64_t expected = pitch(o);
  for (const size_t axis : {4, 3, 2, 0}) {
    const int64_t size = axis == 0 ? c_.batch : c_.y[axis - 2];
    if (size != 1 && c_.step[o][axis] != expected) return false;
    expected *= size;
  }
  return true;
}

/// Products of single places take all lines as one where they can.
void PackedConv::plan_lines() {
  if (taps() != 1 || c_.x != c_.y || c_.stride != Triple{1, 1, 1} || c_.begin != Triple{}) return;
  if (!follows(kX) || !follows(kY) || !follows(kResidual)) return;
  for (Operand o : {kX, kResidual, kY}) c_.step[o][4] = pitch(o);
  c_.y = {1, 1, c_.batch * c_.y[0] * c_.y[1] * c_.y[2]};
  c_.x = c_.y;
  c_.batch = 1;
}

void PackedConv::plan_rows() {
  for (size_t a = 0; a < 2; ++a) {
    for (int64_t at = 0; at < c_.y[a]; ++at) {
      for (int64_t k = 0; k < c_.k[a]; ++k) {
        const int64_t i = at * c_.stride[a] - c_.begin[a] + k * c_.dilation[a];
        lines_[a].push_back(i >= 0 && i < c_.x[a] ? i * c_.step[kX][2 + a] : -1);
      }
    }
  }
  const int64_t stride = c_.stride[2];
  for (int64_t k = 0; k < c_.k[2]; ++k) {
    const int64_t first = k * c_.dilation[2] - c_.begin[2];  // of x, at place 0
    const int64_t from = first >= 0 ? 0 : divide_up(-first, stride);
    const int64_t to = first >= c_.x[2] ? 0 : (c_.x[2] - 1 - first) / stride + 1;
    meetings_.push_back({from, to, first * c_.step[kX][4]});
  }
  const int64_t most = aliased(x_pitch()) ? std::min<int64_t>(tiles_.mr, kAliasedRows) : tiles_.mr;
  const int64_t tiles = divide_up(c_.y[2], most);
  for (int64_t line = 0; line < c_.batch * c_.y[0] * c_.y[1]; ++line) {
    const int64_t n = line / (c_.y[0] * c_.y[1]), y0 = line / c_.y[1] % c_.y[0];
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = c_.y[2] * t / tiles, end = c_.y[2] * (t + 1) / tiles;
      rows_.push_back({n, {y0, line % c_.y[1], begin}, end - begin});
    }
  }
}

/// Whether no place of y meets padding under the kernel's only element.
bool PackedConv::meets_whole() const {
  const auto inside = [](int64_t line) { return line >= 0; };
  return std::all_of(lines_[0].begin(), lines_[0].end(), inside) &&
         std::all_of(lines_[1].begin(), lines_[1].end(), inside) && meetings_[0].from == 0 &&
         meetings_[0].to >= c_.y[2];
}

void PackedConv::plan_blocks() {
  const int64_t most =
      std::max<int64_t>(1, tiles_.block_bytes / (tiles_.nr * int64_t{sizeof(float)}));
  channels_ = divide_up(c_.from, divide_up(c_.from, most));
  const auto tiles = static_cast<int64_t>(rows_.size());
  const double worth = kNsPerFlop * c_.flops() / kWorthThreadNs;
  threads_ = static_cast<int>(std::clamp<double>(
      worth, 1, double(std::min<int64_t>(tiles * panels_, thread_limit()))));
  const int64_t places = c_.batch * c_.y[0] * c_.y[1] * c_.y[2];
  strips_ = taps() == 1 && meets_whole() && panel_floats() * 4 <= kPanelBytes;
  block_rows_ = std::min(places, strips_ ? kBlockBytes / (c_.from * 4) : kBlockRows);
  block_rows_ = std::max<int64_t>(block_rows_, tiles_.mr);
  group_ = panels_ * panel_floats() * 4 <= kNearBytes ? panels_ : 1;
  thread_bytes_ = strips_ ? 0 : floats(block_rows_ * tiles_.nr);
}

uint64_t PackedConv::workspace_bytes() const {
  return thread_bytes_ * static_cast<uint64_t>(threads_) + (c_.constant_w ? 0 : packed_bytes(kW));
}

void PackedConv::pack_panel(const float* w, char* panels, int64_t panel) const {
  const auto& s = c_.step[kW];
  auto* dst = reinterpret_cast<float*>(panels) + panel * panel_floats();
  for (int64_t k0 = 0; k0 < c_.k[0]; ++k0) {
    for (int64_t k1 = 0; k1 < c_.k[1]; ++k1) {
      for (int64_t k2 = 0; k2 < c_.k[2]; ++k2, dst += c_.from * tiles_.nr) {
        tiles_.pack[gemm::kF32]({w + k0 * s[2] + k1 * s[3] + k2 * s[4], s[1], s[0], c_.from, c_.to,
                                 dst, panel, panel + 1});
      }
    }
  }
}

void PackedConv::prepack(size_t, const rm_tensor& source, void* packed) const {
  const auto* w = static_cast<const float*>(plugin::address(source));
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels_; ++p) pack_panel(w, static_cast<char*>(packed), p);
}

int64_t PackedConv::offset(Operand o, const Rows& r) const {
  const auto& s = c_.step[o];
  return r.n * s[0] + r.at[0] * s[2] + r.at[1] * s[3] + r.at[2] * s[4];
}

/// The grid in which the slowest thread computes and reads least. What it reads of other threads'
/// panels, and writes for them, comes from far, too: neighbouring layers share rows where they can.
PackedConv::Share PackedConv::share(int thread, int team) const {
  const auto rows = static_cast<int64_t>(rows_.size());
  const double flop_ns = kNsPerFlop * 2 * double(rows_[0].count) * double(panel_floats());
  const double weight_ns = kNsPerByte * double(packed_bytes(kW));
  const double x_ns = kNsPerByte * 4 * double(c_.batch * c_.x[0] * c_.x[1] * c_.x[2] * c_.from);
  const double y_ns = kNsPerByte * 4 * double(c_.batch * c_.y[0] * c_.y[1] * c_.y[2] * c_.to) *
                      (c_.given[kResidual] ? 2 : 1);
  int by_rows = 1;
  double least = 1e300;
  for (int tm = 1; tm <= team; ++tm) {
    if (team % tm != 0) continue;
    const int tn = team / tm;
    const double cost = flop_ns * double(divide_up(rows, tm) * divide_up(panels_, tn)) +
                        weight_ns / tn + x_ns / tm + y_ns * (1 - 1.0 / tn);
    if (cost < least) least = cost, by_rows = tm;
  }
  const int by_panels = team / by_rows, r = thread / by_panels, p = thread % by_panels;
  return {rows * r / by_rows, rows * (r + 1) / by_rows, panels_ * p / by_panels,
          panels_ * (p + 1) / by_panels};
}

void PackedConv::launch(const rm_launch& l) const {
  if (c_.batch * c_.y[0] * c_.y[1] * c_.y[2] * c_.to == 0) return;
  char* scratch = static_cast<char*>(l.workspace);
  const auto* panels = static_cast<const char*>(l.inputs[kW]);
  const int threads = std::min(threads_, omp_get_max_threads());
  if (!c_.constant_w) {
    char* packed = scratch + thread_bytes_ * static_cast<uint64_t>(threads_);
    parallel_ranges(panels_, threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) {
        pack_panel(static_cast<const float*>(l.inputs[kW]), packed, p);
      }
    });
    panels = packed;
  }
  const auto work = [&](int thread, int team) {
    char* own = scratch + thread_bytes_ * static_cast<uint64_t>(thread);
    run({l, panels, reinterpret_cast<float*>(own)}, share(thread, team));
  };
  if (threads == 1) return work(0, 1);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
}

void PackedConv::run(const Task& t, const Share& s) const {
  if (s.p0 == s.p1) return;
  for (int64_t begin = s.begin; begin < s.end;) {
    int64_t end = begin, rows = 0;
    while (end < s.end && rows + rows_[static_cast<size_t>(end)].count <= block_rows_) {
      rows += rows_[static_cast<size_t>(end++)].count;
    }
    const Share block{begin, end, s.p0, s.p1};
    if (strips_) {
      run_strips(t, block, end < s.end);
    } else {
      for (int64_t p = s.p0; p < s.p1; ++p) run_panel(t, block, p, end < s.end);
    }
    begin = end;
  }
}

/// Where the first of `rows` meets x, and how many of them do, from `begin` on.
PackedConv::Met PackedConv::meet(const Task& t, const Rows& rows, int64_t tap) const {
  const int64_t k2 = tap % c_.k[2], k1 = tap / c_.k[2] % c_.k[1], k0 = tap / (c_.k[2] * c_.k[1]);
  const Meeting& m = meetings_[static_cast<size_t>(k2)];
  const int64_t line0 = lines_[0][static_cast<size_t>(rows.at[0] * c_.k[0] + k0)];
  const int64_t line1 = lines_[1][static_cast<size_t>(rows.at[1] * c_.k[1] + k1)];
  const int64_t from = std::max(rows.at[2], m.from);
  const int64_t to = std::min(rows.at[2] + rows.count, m.to);
  if (line0 < 0 || line1 < 0 || from >= to) return {};
  const auto* x = static_cast<const float*>(t.l.inputs[kX]);
  return {x + rows.n * c_.step[kX][0] + line0 + line1 + m.first + from * x_pitch(),
          from - rows.at[2], to - from};
}

/// Kernels of one element: sums stay in registers. `more`: blocks of rows follow, which read the thread's panels again.
void PackedConv::run_strips(const Task& t, const Share& s, bool more) const {
  const auto* panels = reinterpret_cast<const float*>(t.panels);
  Strip strip{};
  strip.x_stride = x_pitch();
  strip.steps = c_.from;
  strip.plain = c_.activation == kNone || c_.activation == kRelu;
  strip.floor = c_.activation == kRelu ? 0 : -std::numeric_limits<float>::infinity();
  strip.store = set_.store[c_.activation];
  for (int64_t p = s.p0; p < s.p1; p += group_) {
    const int64_t next = std::min(p + group_, s.p1);
    const bool end = next == s.p1;
    strip.panels = panels + p * panel_floats();
    strip.num_panels = next - p;
    strip.channels = std::min(next * tiles_.nr, c_.to) - p * tiles_.nr;
    // The next panels come in from far while these are worked on, a share a tile.
    strip.ahead = reinterpret_cast<const char*>(panels + (end ? s.p0 : next) * panel_floats());
    strip.ahead_step = end && !more ? 0 : divide_up(tiles_.nr * 4, s.end - s.begin);
    if (group_ == panels_) strip.ahead_step = 0;
    for (int64_t i = s.begin; i < s.end; ++i) {
      const Rows& r = rows_[static_cast<size_t>(i)];
      strip.x = meet(t, r, 0).x;
      const PanelStore at = place(t, r, p);
      strip.bias = at.bias, strip.residual = at.residual, strip.y = at.y;
      strip.residual_stride = at.residual_stride, strip.y_stride = at.y_stride;
      set_.strip[r.count - 1](strip);
      strip.ahead += strip.ahead_step * strip.steps * strip.num_panels;
    }
  }
}

/// Larger kernels and long panels: sums wait in memory for the next block of channels.
void PackedConv::run_panel(const Task& t, const Share& s, int64_t panel, bool more) const {
  const auto* panels = reinterpret_cast<const float*>(t.panels);
  const float* b = panels + panel * panel_floats();
  int64_t count = 0;
  for (int64_t r = s.begin; r < s.end; ++r) count += rows_[static_cast<size_t>(r)].count;
  std::memset(t.acc, 0, static_cast<size_t>(count * tiles_.nr) * sizeof(float));
  gemm::TileArgs tile{};
  tile.lda = x_pitch();
  tile.accumulate = true;  // an element of the kernel may leave out rows
  for (int64_t tap = 0; tap < taps(); ++tap) {
    for (int64_t i = 0; i < c_.from; i += channels_) {
      tile.steps = std::min(channels_, c_.from - i);
      tile.b = b;
      b += tile.steps * tiles_.nr;
      // The next block comes in from far while this one is worked on, a share a tile.
      const bool end = tap + 1 == taps() && i + tile.steps == c_.from && panel + 1 == s.p1;
      const float* next = end ? panels + s.p0 * panel_floats() : b;
      tile.ahead = reinterpret_cast<const char*>(next);
      tile.ahead_step = end && !more ? 0 : divide_up(tiles_.nr * 4, s.end - s.begin);
      float* acc = t.acc;
      for (int64_t r = s.begin; r < s.end; ++r, tile.ahead += tile.steps * tile.ahead_step) {
        const Rows& rows = rows_[static_cast<size_t>(r)];
        const Met met = meet(t, rows, tap);
        tile.a = met.x + i;
        tile.acc = acc + met.begin * tiles_.nr;
        if (met.count > 0) tiles_.tile[gemm::kF32][met.count - 1][0](tile);
        acc += rows.count * tiles_.nr;
      }
    }
  }
  PanelStore store;
  const float* acc = t.acc;
  for (int64_t r = s.begin; r < s.end; ++r) {
    const Rows& rows = rows_[static_cast<size_t>(r)];
    store = place(t, rows, panel);
    store.acc = acc;
    set_.store[c_.activation](store);
    acc += rows.count * tiles_.nr;
  }
}

/// Where a tile's results go, all but the sums.
PanelStore PackedConv::place(const Task& t, const Rows& r, int64_t panel) const {
  const int64_t channel = panel * tiles_.nr;
  const auto at = [&](Operand o, const void* base) {
    return static_cast<const float*>(base) + offset(o, r) + channel;
  };
  PanelStore s{};
  s.rows = r.count;
  s.channels = std::min<int64_t>(tiles_.nr, c_.to - channel);
  s.y = const_cast<float*>(at(kY, t.l.outputs[0]));
  s.y_stride = c_.step[kY][4];
  if (c_.given[kBias]) s.bias = static_cast<const float*>(t.l.inputs[kBias]) + channel;
  if (c_.given[kResidual]) {
    s.residual = at(kResidual, t.l.inputs[kResidual]);
    s.residual_stride = c_.step[kResidual][4];
  }
  return s;
}

}  // namespace rm::cpu::conv
