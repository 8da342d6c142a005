// The row of gemm for up to 128 rows: the forms it has, which one a product takes, its launch.
#include "gemm/few.hpp"

#include <algorithm>

#include "_shim/launch_shim.hpp"
#include "gemm/kernels/gemm_few_sm90a.cuh"
#include "gemm/wgmma.hpp"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kLeastRows = 9, kMostRows = 128;

/// A block's tile is 64 rows by so many columns; so many blocks of a cluster take a part of K each.
struct Form {
  int columns, parts;
};
/// The forms that won somewhere among 63 (decision 0251).
constexpr Form kForms[] = {{48, 2}, {72, 2}, {48, 4}, {96, 2}, {96, 8}};

/// A product cut by a form.
struct Cut {
  const Form* form = nullptr;
  std::int64_t blocks = 0;
  int chunks = 0, bytes = 0;  // of 64 of K and of shared memory, a block's
  bool at_once = false;       // all blocks run at once, evenly
};

Cut cut_by(const Form& f, const GemmShape& s) {
  Cut c{&f};
  c.blocks = ceil_div(s.m, kFewRows) * ceil_div(s.n, f.columns) * f.parts;
  const std::int64_t chunks = ceil_div(s.k, 64 * f.parts);
  if (chunks > kFewMostChunks) return {};
  c.chunks = static_cast<int>(chunks);
  c.bytes = few_bytes(f.columns, f.parts, c.chunks);
  if (c.bytes > kHopperSharedBytes || shared_why_not(c.bytes)) return {};
  const std::int64_t count = multiprocessors() > 0 ? multiprocessors() : kMeasuredMultiprocessors;
  const bool two_each = f.columns == 48 && f.parts == 2 && c.bytes <= kHopperSharedBytes / 2;
  c.at_once = c.blocks <= count || (two_each && 2 * c.blocks > 3 * count && c.blocks <= 2 * count);
  return c;
}

/// Of the forms whose blocks run at once, one a multiprocessor (two where that keeps most of them
/// busy), the one with the least shared memory, so that blocks of the next launch find room and ask
/// for their weights early; a part of K counts as 4 KiB, which is about what it costs to meet.
/// Without such a form the one with the fewest blocks. form is null where none fits.
Cut cut_of(const GemmShape& s) {
  Cut best;
  const auto weight = [](const Cut& c) {
    return c.at_once ? c.bytes + 4096 * c.form->parts : c.blocks;
  };
  for (const Form& f : kForms) {
    const Cut c = cut_by(f, s);
    if (c.form == nullptr) continue;
    const bool less = best.form && c.at_once == best.at_once && weight(c) < weight(best);
    if (best.form == nullptr || (c.at_once && !best.at_once) || less) best = c;
  }
  return best;
}

bool in_pairs(const void* data, std::int64_t pitch) {
  return reinterpret_cast<std::uintptr_t>(data) % 4 == 0 && pitch % 2 == 0;
}

template <class T, int kN, int kParts, FewKind kKind>
Status launch_kind(const FewArgs& args, const Cut& cut, Stream stream) {
  static thread_local int allowed_on = -1;
  const int device = card().device;
  const auto kernel = gemm_few<T, kN, kParts, kKind>;
  if (allowed_on != device) {
    const Status s = allow_shared_memory("gemm", kernel, kHopperSharedBytes);
    if (!s) return s;
    allowed_on = device;
  }
  const Launch how{static_cast<unsigned>(cut.blocks), 128, static_cast<std::size_t>(cut.bytes),
                   kParts, true};
  return launch("gemm", kernel, how, stream, args);
}

FewKind kind_of(const FewArgs& args, int columns) {
  const EpilogueArgs& e = args.epilogue;
  const bool of_columns = e.bias_kind == static_cast<int>(BiasKind::column);
  const bool plain = e.bias == nullptr || of_columns;
  if (!args.pairs || args.n % columns != 0 || !plain || e.aux) return FewKind::any;
  const auto activation = static_cast<Activation>(e.activation);
  if (activation == Activation::none) return FewKind::linear;
  return activation == Activation::gelu ? FewKind::gelu : FewKind::any;
}

template <class T, int kN, int kParts>
Status launch_form(const FewArgs& args, const Cut& cut, Stream stream) {
  switch (kind_of(args, kN)) {
    case FewKind::linear:
      return launch_kind<T, kN, kParts, FewKind::linear>(args, cut, stream);
    case FewKind::gelu:
      return launch_kind<T, kN, kParts, FewKind::gelu>(args, cut, stream);
    default:
      return launch_kind<T, kN, kParts, FewKind::any>(args, cut, stream);
  }
}

template <class T>
Status launch_of(const FewArgs& args, const Cut& cut, Stream stream) {
  const Form& f = *cut.form;
  if (f.columns == 48 && f.parts == 2) return launch_form<T, 48, 2>(args, cut, stream);
  if (f.columns == 48) return launch_form<T, 48, 4>(args, cut, stream);
  if (f.columns == 72) return launch_form<T, 72, 2>(args, cut, stream);
  if (f.parts == 2) return launch_form<T, 96, 2>(args, cut, stream);
  return launch_form<T, 96, 8>(args, cut, stream);
}

}  // namespace

const char* few_why_not(const Gemm& p) {
  if (p.trans_a || !p.trans_b) return "few rows want a [M, K] and b [N, K]";
  const GemmShape s = gemm_shape(p);
  if (s.batch != 1) return "it is more than one product";
  if (s.m < kLeastRows || s.m > kMostRows) return "it is not for 9 to 128 rows";
  if (const char* why = wgmma_why_not(p)) return why;
  if (cut_of(s).form == nullptr) return "K is too long for the shared memory of a cluster";
  return nullptr;
}

/// A launch and what a multiprocessor reads (measured: decision 0251). Blocks that do not run at
/// once were not measured: left to the other rows.
double few_us(const Gemm& p) {
  const GemmShape s = gemm_shape(p);
  const Cut c = cut_of(s);
  if (c.form == nullptr || !c.at_once) {
    return 1000.0 + static_cast<double>(c.blocks);
  }
  const std::int64_t turns = c.blocks > std::max(1, multiprocessors()) ? 2 : 1;
  const double bytes = static_cast<double>(turns * c.chunks) * (kFewRows + c.form->columns) * 128;
  return 1.9 + bytes / block_rate(1e5);
}

Status launch_few(const Gemm& p, Workspace, Stream stream) {
  const GemmShape s = gemm_shape(p);
  const Cut cut = cut_of(s);
  FewArgs args{};
  args.m = static_cast<int>(s.m), args.n = static_cast<int>(s.n);
  args.tiles_m = static_cast<int>(ceil_div(s.m, kFewRows)), args.chunks = cut.chunks;
  args.early = p.overlap && p.stable_weights;
  args.c = p.c.data, args.c_pitch = s.c.pitch;
  args.epilogue = epilogue_args(s.epilogue);
  const EpilogueArgs& e = args.epilogue;
  args.pairs = in_pairs(args.c, args.c_pitch) && in_pairs(e.bias, 0) &&
               in_pairs(e.residual, e.residual_pitch) && in_pairs(e.aux, e.aux_pitch);
  const DType t = p.c.dtype;
  if (!make_wgmma_map(&args.a, t, p.a.data, 1, s.m, s.k, s.a.pitch, 0, kFewRows) ||
      !make_wgmma_map(&args.b, t, p.b.data, 1, s.n, s.k, s.b.pitch, 0, cut.form->columns)) {
    return {Code::device_error,
            "[gemm] expected tensor maps of the operands, got a refusal for " +
                std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                std::to_string(s.k) + "; try another kernel"};
  }
  return t == DType::bf16 ? launch_of<__nv_bfloat16>(args, cut, stream)
                          : launch_of<__half>(args, cut, stream);
}

}  // namespace rm::cuda_ops
