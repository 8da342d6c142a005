// Picks prefill, decode or the f64 form of sdpa at prepare time and splits the work over threads.
#include "ops/sdpa/rows.hpp"

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "ops/sdpa/attended.hpp"
#include "ops/sdpa/read_shape.hpp"

namespace rm::cpu {
RM_CPU_TABLE(SdpaPrefill, sdpa_prefill)
RM_CPU_TABLE(SdpaDecode, sdpa_decode)
#if RM_CPU_X86
namespace amx_bf16 {
extern const SdpaPrefill sdpa_prefill;
}
#endif
namespace {

constexpr int64_t kDecodeQueries = 4;  // up to here packing K costs more than it brings
constexpr int64_t kDecodeKeys =
    256;  // keys a decode piece: fixed, so results do not depend on threads

SdpaShape read_shape(const Problem& p) { return read_sdpa_shape(p, p.output(0)); }

double flops(const SdpaShape& s) {
  const double keys = static_cast<double>(s.t) * (s.causal ? 0.55 : 1.0);
  return 2.0 * static_cast<double>(s.batch * s.heads * s.s) * keys *
         static_cast<double>(s.d + s.e + 8);
}

bool is_dense(const View& v) {
  int64_t step = 1;
  for (int i = v.rank() - 1; i >= 0; --i) {
    if (v.dim(i) != 1 && v.step(i) != step) return false;
    step *= v.dim(i);
  }
  return true;
}

class Sdpa {
 public:
  static constexpr const char* kOp = "sdpa";
  static constexpr const char* kAlgorithm = "blocked";

  static const char* reject(const Problem& p) {
    const View q = p.input(0), k = p.input(1), v = p.input(2), o = p.output(0);
    if (q.rank() != 4 || k.rank() != 4 || v.rank() != 4 || o.rank() != 4) return "rank is not 4";
    if (!is_float(q.dtype)) return "q is not of a float type";
    if (k.dtype != q.dtype || v.dtype != q.dtype || o.dtype != q.dtype) return "mixed types";
    if (k.dim(1) == 0 ? q.dim(1) != 0 : q.dim(1) % k.dim(1)) {
      return "query heads are not a multiple of key heads";
    }
    if (p.has_output(1)) {
      const View lse = p.output(1);
      if (lse.dtype != (q.dtype == DType::f64 ? q.dtype : DType::f32)) return "lse of another type";
      if (lse.rank() != 3 || !is_dense(lse)) return "lse is not dense [B, H, S]";
    }
    if (!p.has_input(3)) return nullptr;
    const View m = p.input(3);
    if (m.rank() != 4) return "the mask's rank is not 4";
    return is_float(m.dtype) || m.dtype == DType::boolean ? nullptr
                                                          : "the mask is neither bool nor float";
  }
  static double cost_ns(const Problem& p) { return 1000 + flops(read_shape(p)) / 50; }
  static std::vector<rm_edge> edges(Isa isa) {
    return edges(*RM_CPU_PICK(isa, sdpa_prefill), *RM_CPU_PICK(isa, sdpa_decode));
  }
  static std::vector<rm_edge> edges(const SdpaPrefill& prefill, const SdpaDecode& decode) {
    return {{'S', 0, kDecodeQueries}, {'S', 0, prefill.rows},      {'S', 0, prefill.row_block},
            {'T', 0, decode.tile},    {'T', 0, decode.near_keys},  {'T', 0, kDecodeKeys},
            {'T', 0, prefill.columns}, {'T', 0, prefill.key_block}, {'E', 0, prefill.columns}};
  }

  Sdpa(const Problem& p, Isa isa)
      : Sdpa(p, *RM_CPU_PICK(isa, sdpa_prefill), *RM_CPU_PICK(isa, sdpa_decode)) {}

  Sdpa(const Problem& p, const SdpaPrefill& prefill, const SdpaDecode& decode)
      : shape_(read_shape(p)), prefill_(&prefill), decode_(&decode) {
    has_mask_ = shape_.mask != DType::invalid;
    has_lse_ = p.has_output(1);
    threads_ = thread_limit();
    if (shape_.type == DType::f64) {
      kind_ = Kind::f64;
      scratch_ = (static_cast<uint64_t>(shape_.t) * 8 + 63) & ~63ull;
    } else if (shape_.s <= kDecodeQueries) {
      kind_ = Kind::decode;
      pieces_ = std::max<int64_t>(1, (shape_.t + kDecodeKeys - 1) / kDecodeKeys);
      scratch_ = std::max<uint64_t>(decode_->scratch_bytes(shape_, std::min(shape_.t, kDecodeKeys)),
                                    (static_cast<uint64_t>(shape_.e) * 4 + 63) & ~63ull);
    } else {
      kind_ = Kind::prefill;
      rows_ = rows_a_task();
      scratch_ = prefill_->scratch_bytes(shape_, rows_);
    }
  }

  uint64_t workspace_bytes() const {
    return scratch_ * static_cast<uint64_t>(threads_) +
           static_cast<uint64_t>(shape_.batch * shape_.groups) *
               (static_cast<uint64_t>(partial_floats() * pieces_) * 4 + sizeof(KeyRange)) +
           sizeof(KeyRange);
  }

  rm_status* launch(const rm_launch& l) const {
    if (shape_.batch * shape_.heads * shape_.s * shape_.e == 0) return nullptr;
    const SdpaData data{l.inputs[0], l.inputs[1], l.inputs[2], has_mask_ ? l.inputs[3] : nullptr,
                        l.outputs[0], has_lse_ ? l.outputs[1] : nullptr};
    auto* memory = static_cast<char*>(l.workspace);
    switch (kind_) {
      case Kind::prefill:
        run_prefill(data, memory);
        break;
      case Kind::decode:
        run_decode(data, memory);
        break;
      case Kind::f64:
        run_f64(data, memory);
        break;
    }
    return nullptr;
  }

 private:
  enum class Kind { prefill, decode, f64 };

  // Few heads: rows are cut so that every thread gets some. Rows do not depend on the cut.
  int64_t rows_a_task() const {
    const int64_t unit = prefill_->row_block;
    const int64_t heads = std::max<int64_t>(1, shape_.batch * shape_.heads);
    const int threads = threads_for(flops(shape_) / 40, heads * shape_.s, threads_);
    int64_t rows = std::min<int64_t>(shape_.s, 256);
    while (rows > unit && heads * ((shape_.s + rows - 1) / rows) < 3 * threads)
      rows = (rows + 1) / 2;
    return std::max<int64_t>(1, std::min(shape_.s, (rows + unit - 1) / unit * unit));
  }

  int64_t partial_floats() const {
    return kind_ == Kind::decode && shape_.groups
               ? shape_.heads / shape_.groups * shape_.s * (2 + shape_.e)
               : 0;
  }

  void run_prefill(const SdpaData& data, char* memory) const {
    const int64_t cuts = (shape_.s + rows_ - 1) / rows_, tasks = shape_.batch * shape_.heads * cuts;
    const int threads = threads_for(flops(shape_) / 40, tasks, threads_);
    parallel_tasks(tasks, threads, [&](int64_t task, int thread) {
      // The last rows come first: under a causal mask they are the longest.
      const int64_t cut = cuts - 1 - task % cuts, head = task / cuts;
      prefill_->run(shape_, data, head / shape_.heads, head % shape_.heads, cut * rows_,
                    std::min(shape_.s, (cut + 1) * rows_),
                    memory + scratch_ * static_cast<uint64_t>(thread));
    });
  }

  /// Pieces begin at fixed keys and are cut to what the mask leaves; the others are not touched.
  void run_decode(const SdpaData& data, char* memory) const {
    const int64_t all = shape_.batch * shape_.groups, tasks = all * pieces_;
    auto* partials = reinterpret_cast<float*>(memory + scratch_ * static_cast<uint64_t>(threads_));
    // The next multiple of 8 bytes behind the partial results.
    auto* ranges = reinterpret_cast<KeyRange*>(partials + (tasks * partial_floats() + 1) / 2 * 2);
    const int64_t keys = find_ranges(data, ranges);
    const double share = static_cast<double>(keys) / static_cast<double>(all * shape_.t + 1);
    const int threads = threads_for(flops(shape_) * share / 12, tasks, threads_);
    const auto combine = [&](int64_t bg, char* scratch) {
      const int64_t first = ranges[bg].begin / kDecodeKeys;
      const int64_t last = (ranges[bg].end + kDecodeKeys - 1) / kDecodeKeys;
      decode_->combine(shape_, data, bg / shape_.groups, bg % shape_.groups,
                       partials + (bg * pieces_ + first) * partial_floats(), last - first,
                       reinterpret_cast<float*>(scratch));
    };
    parallel_tasks_ahead(tasks, threads, [&](int64_t task, int64_t next, int thread) {
      char* scratch = memory + scratch_ * static_cast<uint64_t>(thread);
      const SdpaPiece piece = piece_of(task, ranges);
      if (piece.t0 < piece.t1) {
        decode_->run(shape_, data, piece, next < 0 ? SdpaPiece{} : piece_of(next, ranges),
                     partials + task * partial_floats(), scratch);
      }
      if (pieces_ == 1) combine(task, scratch);
    });
    for (int64_t bg = 0; pieces_ > 1 && bg < all; ++bg) combine(bg, memory);
  }

  SdpaPiece piece_of(int64_t task, const KeyRange* ranges) const {
    const int64_t piece = task % pieces_, bg = task / pieces_;
    return {bg / shape_.groups, bg % shape_.groups, std::max(piece * kDecodeKeys, ranges[bg].begin),
            std::min((piece + 1) * kDecodeKeys, ranges[bg].end)};
  }

  /// Once a call, and once for all heads where they share the mask; returns the sum of keys.
  int64_t find_ranges(const SdpaData& data, KeyRange* ranges) const {
    const int64_t share = shape_.groups ? shape_.heads / shape_.groups : 0;
    int64_t keys = 0;
    for (int64_t b = 0; b < shape_.batch; ++b) {
      for (int64_t g = 0; g < shape_.groups; ++g) {
        KeyRange& range = ranges[b * shape_.groups + g];
        const bool shared = g > 0 && (shape_.mask == DType::invalid || shape_.m[1] == 0);
        range = shared ? ranges[b * shape_.groups]
                       : attended(shape_, data, b, g * share, (g + 1) * share);
        keys += range.end - range.begin;
      }
    }
    return keys;
  }

  void run_f64(const SdpaData& data, char* memory) const {
    const int64_t tasks = shape_.batch * shape_.heads * shape_.s;
    const int threads = threads_for(flops(shape_), tasks, threads_);
    parallel_ranges(tasks, threads, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / shape_.s;
        sdpa_f64(shape_, data, head / shape_.heads, head % shape_.heads, i % shape_.s,
                 reinterpret_cast<double*>(memory + scratch_ * static_cast<uint64_t>(thread)));
      }
    });
  }

  SdpaShape shape_;
  const SdpaPrefill* prefill_;
  const SdpaDecode* decode_;
  Kind kind_ = Kind::prefill;
  bool has_mask_ = false, has_lse_ = false;
  int64_t rows_ = 0, pieces_ = 0;
  uint64_t scratch_ = 0;
  int threads_ = 1;
};

#if RM_CPU_X86
/// Many queries on matrix tiles.
struct AmxRow {
  using State = Sdpa;
  static const char* why_not(const rm_problem& raw, const rm_device_info*) {
    if (!extras().amx_bf16) return "this machine (or the option cpu_isa) has no AMX for bf16";
    const Problem p(raw);
    if (const char* why = Sdpa::reject(p)) return why;
    if (p.input(0).dtype != DType::bf16) return "amx: bf16 only";
    if (p.input(0).dim(2) <= kDecodeQueries) return "amx: few queries";
    if (p.input(0).dim(3) == 0) return "amx: no products";
    for (int i = 0; i < 3; ++i) {
      const View v = p.input(i);
      if (v.dim(3) > 1 && v.step(3) != 1) return "amx: rows of q, k or v are not dense";
    }
    return nullptr;
  }
  static double cost_ns(const rm_problem& raw, const rm_device_info*) {
    return 1000 + flops(read_shape(Problem(raw))) / 400;
  }
  static Sdpa* make(const rm_problem& raw, const rm_device_info*) {
    return new Sdpa(Problem(raw), amx_bf16::sdpa_prefill, *RM_CPU_PICK(Isa::avx512, sdpa_decode));
  }
  static std::span<const rm_edge> edges() {
    static const std::vector<rm_edge> edges =
        Sdpa::edges(amx_bf16::sdpa_prefill, *RM_CPU_PICK(Isa::avx512, sdpa_decode));
    return edges;
  }
};
#endif

}  // namespace

std::span<const rm_kernel> sdpa_rows() {
  static const std::vector<rm_kernel> rows = [] {
    std::vector<rm_kernel> out;
#if RM_CPU_X86
    out.push_back(plugin::kernel_row<AmxRow>(Sdpa::kOp, "sdpa_amx_bf16", build_id(),
                                             RM_KERNEL_DETERMINISTIC));
#endif
    const std::span<const rm_kernel> others = isa_rows<Sdpa>();
    out.insert(out.end(), others.begin(), others.end());
    return out;
  }();
  return rows;
}

}  // namespace rm::cpu
