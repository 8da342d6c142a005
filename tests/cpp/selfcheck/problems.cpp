#include "problems.hpp"

#include <cstdlib>
#include <set>

#include "backend/registry.hpp"

namespace rm::selfcheck_test {

using ir::DType;
using ir::Ints;
using select::Operand;
using selfcheck::Shape;

Backend& cpu() {
  static Backend& backend = [&]() -> Backend& {
    backend::Options options;
    if (const char* set = std::getenv("RM_CPU_ISA")) options.emplace_back("cpu_isa", set);
    // Another plugin's rows, those of a device: on a machine that has one.
    if (const char* path = std::getenv("RM_TEST_KERNELS")) return backend::registry().load(path);
    if (const char* path = std::getenv("RM_TEST_ONEDNN")) options.emplace_back("onednn_path", path);
    return backend::registry().load(RM_CPU_PLUGIN, options);
  }();
  return backend;
}

std::vector<std::string> operators() {
  std::set<std::string> out;
  for (const rm_kernel& row : cpu().kernels()) out.insert(text(row.op));
  return {out.begin(), out.end()};
}

std::string text(rm_str s) { return {s.data, s.size}; }

Operand dense(DType dtype, Ints dims, bool constant) {
  return {true, ir::contiguous(dtype, std::move(dims)), constant};
}

std::unique_ptr<select::Problem> problem_of(const Shape& s) {
  const rm_device_info& info = cpu().get_device_info(0);
  const DLDevice device{static_cast<DLDeviceType>(info.dl_device_type), info.dl_device_id};
  return std::make_unique<select::Problem>(s.op, s.inputs, s.outputs, s.attrs, device);
}

bool supports(const rm_kernel& row, const Shape& shape, std::string* why_not) {
  if (text(row.op) != shape.op) return false;
  const auto problem = problem_of(shape);
  rm_str why{"", 0};
  const bool yes = row.supports(&problem->c(), &cpu().get_device_info(0), &why) != 0;
  if (!yes && why_not != nullptr) *why_not = text(why);
  return yes;
}

Shape gemm(int64_t m, int64_t n, int64_t k, DType dtype) {
  return {"gemm",
          {dense(dtype, {m, k}), dense(dtype, {n, k}, true), dense(dtype, {n}, true), absent()},
          {dense(dtype, {m, n})},
          {{"trans_b", int64_t{1}}, {"activation", std::string("none")}, {"alpha", 1.0}}};
}

Shape grouped_gemm(int64_t m, int64_t n, int64_t k, bool turned, DType dtype) {
  Operand experts = dense(dtype, turned ? Ints{2, n, k} : Ints{2, k, n}, true);
  if (turned) experts.layout = ir::view_permute(experts.layout, {0, 2, 1});
  return {"grouped_gemm", {dense(dtype, {m, k}), experts, dense(DType::kI32, {2})}, {dense(dtype, {m, n})}, {}};
}

Shape sdpa(int64_t s, int64_t t, int64_t e, DType dtype) {
  return {"sdpa",
          {dense(dtype, {1, 2, s, 40}), dense(dtype, {1, 1, t, 40}), dense(dtype, {1, 1, t, e}), absent()},
          {dense(dtype, {1, 2, s, e})},
          {{"scale", 0.125}, {"is_causal", int64_t{s > 1}}}};
}

Shape sdpa_backward(int64_t s, int64_t t, int64_t d, DType dtype) {
  const Operand q = dense(dtype, {1, 2, s, d}), k = dense(dtype, {1, 1, t, d});
  return {"sdpa_backward",
          {q, k, k, absent(), absent(), q, dense(DType::kF32, {1, 2, s}), q},
          {q, k, k},
          {{"scale", 0.125}, {"is_causal", int64_t{s > 1}}}};
}

Shape quant_linear(int64_t m, int64_t n, int64_t k, int64_t bits, int64_t tile, DType dtype) {
  const int64_t p = (k + 63) / 64 * 64 * bits / 8, g = (k + 31) / 32;
  return {"quant_linear",
          {dense(dtype, {m, k}), dense(bits == 8 ? DType::kI8 : DType::kU8, {n, p}, true),
           dense(DType::kF16, {n, g}, true), absent(), dense(dtype, {n}, true), absent()},
          {dense(dtype, {m, n})},
          {{"bits", bits}, {"group", int64_t{32}}, {"tile", tile},
           {"x_bits", int64_t{tile == 8 ? 8 : 16}}, {"activation", std::string("none")}}};
}

Shape quant_linear_pairs(int64_t m, int64_t n, int64_t k, int64_t bits, int64_t group, DType dtype) {
  const int64_t p = (k + 63) / 64 * 64 * bits / 8, g = (k + group - 1) / group;
  return {"quant_linear",
          {dense(dtype, {m, k}), dense(bits == 8 ? DType::kI8 : DType::kU8, {n, p}, true),
           dense(dtype, {g, n}, true), absent(), dense(dtype, {n}, true), absent()},
          {dense(dtype, {m, n})},
          {{"bits", bits}, {"group", group}, {"pairs", int64_t{1}}, {"activation", std::string("none")}}};
}

namespace {

void add_products(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    out.push_back(gemm(7, 10, 40, t));
    out.push_back(gemm(2048, 1000, 768, t));
    out.push_back(gemm(1, 50257, 1280, t));
    Shape unpacked = gemm(3, 4099, 2048, t);
    unpacked.attrs["pack_weights"] = int64_t{0};
    unpacked.attrs["activation"] = std::string("gelu");
    unpacked.inputs[3] = dense(t, {3, 4099});
    out.push_back(unpacked);
    // Experts, stored both ways, and one that is not constant.
    for (bool turned : {false, true}) {
      for (int64_t rows : {int64_t{7}, int64_t{331}}) out.push_back(grouped_gemm(rows, 200, 256, turned, t));
    }
    out.push_back({"grouped_gemm", {dense(t, {70, 33}), dense(t, {5, 33, 47}), dense(DType::kI64, {5})},
                   {dense(t, {70, 47})}, {}});
    // As lowered from matmul: batched, [K,N], nothing constant.
    out.push_back({"gemm",
                   {dense(t, {2, 12, 65, 64}), dense(t, {2, 12, 64, 77}), absent(), absent()},
                   {dense(t, {2, 12, 65, 77})},
                   {{"trans_b", int64_t{0}}, {"activation", std::string("none")}, {"alpha", 0.125}}});
    // Gradients of a small batch: of an operand, and of a weight.
    const ir::Attrs plain{{"trans_b", int64_t{0}}, {"activation", std::string("none")}, {"alpha", 1.0}};
    out.push_back({"gemm", {dense(t, {19, 256}), dense(t, {256, 300}), absent(), absent()},
                   {dense(t, {19, 300})}, plain});
    Operand turned = dense(t, {17, 300});
    turned.layout = ir::view_permute(turned.layout, {1, 0});
    out.push_back({"gemm", {turned, dense(t, {17, 131}), absent(), absent()}, {dense(t, {300, 131})}, plain});
    for (int64_t classes : {int64_t{5000}, int64_t{777}}) {
      Operand logits = dense(t, {40, (classes + 7) / 8 * 8});
      logits.layout = ir::view_slice(logits.layout, 1, 0, classes, 1);
      const Operand target = dense(DType::kI64, {40});
      const Operand row = dense(t == DType::kF64 ? t : DType::kF32, {40});
      out.push_back({"cross_entropy", {logits, target}, {row, row}, {}});
      out.push_back({"cross_entropy_backward", {logits, target, row, row}, {logits}, {}});
    }
    for (bool added : {false, true}) {
      const Operand rows = dense(t, {3, 70, 768}), column = dense(t, {768});
      const ir::Attrs eps{{"eps", 1e-5}};
      out.push_back({"layer_norm_backward", {rows, rows, column, added ? rows : absent()},
                     {rows, column, column}, eps});
      out.push_back({"rms_norm_backward", {rows, rows, added ? absent() : column, added ? rows : absent()},
                     {rows, column}, eps});
    }
    for (int64_t s : {int64_t{1}, int64_t{131}}) {
      for (bool masked : {false, true}) {
        Operand out_of = dense(t, {2, s, 6, 64});
        out_of.layout = ir::view_permute(out_of.layout, {0, 2, 1, 3});
        Operand mask = dense(masked && s > 1 ? DType::kBool : t, {2, 1, s, 300});
        mask.layout = ir::view_expand(mask.layout, {2, 6, s, 300});
        const Operand q = dense(t, {2, 6, s, 64}), k = dense(t, {2, 3, 300, 64});
        const Operand lse = dense(t == DType::kF64 ? t : DType::kF32, {2, 6, s}), mask_or_none = masked ? mask : absent();
        const ir::Attrs attrs{{"scale", 0.125}, {"is_causal", int64_t{s > 1 && !masked}}};
        out.push_back({"sdpa", {q, k, k, mask_or_none}, {out_of}, attrs});
        ir::Attrs kept = attrs;
        kept["lse"] = int64_t{1};
        out.push_back({"sdpa", {q, k, k, mask_or_none}, {out_of, lse}, kept});
        out.push_back({"sdpa_backward", {q, k, k, mask_or_none, absent(), out_of, lse, out_of},
                       {out_of, k, k}, attrs});
      }
    }
  }
}

/// Products of one normalised row with weights of 8 or 4 bits.
void add_quantised_groups(std::vector<Shape>& out, DType t, int64_t bits) {
  constexpr int64_t kGroup = 128;
  ir::Attrs plain{{"activation", std::string("none")}, {"centred", int64_t{0}}, {"eps", 1e-5},
                  {"gated", int64_t{0}}, {"weight_offset", 0.0}, {"bits", bits}, {"group", kGroup}, {"pairs", int64_t{1}}};
  ir::Attrs gated = plain, offset = plain;
  gated["gated"] = int64_t{1}, gated["activation"] = std::string("silu");
  offset["weight_offset"] = 1.0;
  for (int64_t k : {64, 896, 2048, 9216}) {
    const Operand norm = dense(t, {k}, true), none = absent();
    const auto shape = [&](Operand residual, ir::Attrs attrs) {
      return Shape{"quant_linears", {dense(t, {1, 1, k}), norm, none, std::move(residual)}, {}, std::move(attrs)};
    };
    const auto add = [&](Shape& s, int64_t n, const Operand& bias, bool result) {
      s.inputs.push_back(dense(bits == 8 ? DType::kI8 : DType::kU8, {n, k * bits / 8}, true));
      s.inputs.push_back(dense(t, {(k + kGroup - 1) / kGroup, n}, true));
      s.inputs.push_back(bias);
      if (result) s.outputs.push_back(dense(t, {1, 1, n}));
    };
    Shape three = shape(none, plain), two = shape(none, gated), one = shape(dense(t, {1, 1, 296}), offset);
    add(three, k, dense(t, {k}, true), true), add(three, 512, none, true);
    add(three, 520, dense(t, {520}, true), true);
    add(two, 4864, none, true), add(two, 4864, none, false);
    add(one, 296, none, true);
    for (Shape* s : {&three, &two, &one}) out.push_back(std::move(*s));
  }
}

/// Sums of rows and a column's cast, log-softmax, a look-up in it, and a program over all of them.
Shape small_steps(int64_t rows, int64_t classes) {
  constexpr int64_t kEwise = 0, kReduce = 1, kSoftmax = 2, kGather = 3, kF32 = 0x220, kRankTwo = 2;
  // Places: 0 scores, 1 class numbers, 2 the result, 3 the looked up, 4 log-softmax, 5 sums.
  const auto inner = [](int64_t slot, int64_t width) { return Ints{slot, 0, width, 1}; };
  Ints program{2, kF32, rows * classes, kF32, rows};
  const auto part = [&](std::initializer_list<int64_t> head, std::initializer_list<Ints> places) {
    program.insert(program.end(), head);
    for (const Ints& place : places) program.insert(program.end(), place.begin(), place.end());
  };
  part({kSoftmax, 1, 0, kRankTwo, rows, classes, 1}, {inner(4, classes), {0}});
  part({kReduce, 0, 2, kRankTwo, rows, classes, 1}, {inner(5, 1), inner(4, classes)});
  part({kGather, 1, classes, kRankTwo, rows, 1, 2}, {inner(3, 1), inner(4, classes), {1}});
  // x * log-softmax + sum, the sum repeated along its row.
  part({kEwise, 0, 2, kRankTwo, rows, classes, 3}, {inner(2, classes), {0}, inner(4, classes), {5, 0, 1, 0}});
  return {"small_steps",
          {dense(DType::kF32, {rows, classes}), dense(DType::kI64, {rows, 1})},
          {dense(DType::kF32, {rows, classes}), dense(DType::kF32, {rows, 1})},
          {{"program", program}, {"code", Ints{42, 0, 0, 1, -1, 40, 0, 3, 2, -1}}, {"imm", std::vector<double>{}}}};
}

/// Only some devices have rows for these.
void add_fused(std::vector<Shape>& out) {
  for (bool sums : {false, true}) {
    Shape s{"slopes", {}, {}, {}};
    for (const ir::Ints& sizes : {ir::Ints{64, 256, 256}, ir::Ints{64, 10, 256}, ir::Ints{7, 33, 5}}) {
      s.inputs.push_back(dense(DType::kF32, {sizes[0], sizes[1]}));
      s.inputs.push_back(dense(DType::kF32, {sizes[0], sizes[2]}));
      s.outputs.push_back(dense(DType::kF32, {sizes[1], sizes[2]}));
      s.outputs.push_back(sums || sizes[0] == 7 ? dense(DType::kF32, {sizes[1]}) : absent());
    }
    out.push_back(std::move(s));
    Operand row = dense(DType::kF32, {256});  // relu's slope of another value, times a row
    row.layout = ir::view_expand(row.layout, {64, 256});
    const int64_t k = sums ? 256 : 10;
    out.push_back({"gemm_ewise",
                   {dense(DType::kF32, {64, k}), dense(DType::kF32, sums ? ir::Ints{256, k} : ir::Ints{k, 256}),
                    dense(DType::kF32, {64, 256}), row},
                   {dense(DType::kF32, {64, 256})},
                   {{"trans_b", int64_t{sums}}, {"imm", std::vector<double>{0}},
                    {"code", ir::Ints{0, 0, 0, -1, -1, 52, 0, 1, 3, -1, 70, 0, 4, 3, 0, 42, 0, 5, 2, -1}}}});
  }
  out.push_back(small_steps(64, 10));
  out.push_back(small_steps(5, 129));
  for (bool apply : {false, true}) {
    Shape s{"adams", {dense(DType::kF32, {8}), apply ? dense(DType::kBool, {}) : absent()}, {},
            {{"decay", std::string(apply ? "parameter" : "gradient")}, {"maximize", int64_t{0}}}};
    for (const ir::Ints& dims : {ir::Ints{3072, 768}, ir::Ints{768}, ir::Ints{5, 3, 7}}) {
      for (int i = 0; i < 4; ++i) s.inputs.push_back(dense(DType::kF32, dims));
      for (int i = 0; i < 3; ++i) s.outputs.push_back(dense(DType::kF32, dims));
    }
    out.push_back(std::move(s));
  }
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t bits : {4, 8}) {
      if (t != DType::kF32) add_quantised_groups(out, t, bits);
    }
    const auto weight = [&](int64_t n, int64_t k) { return dense(t, {n, k}, true); };
    const ir::Attrs plain{{"activation", std::string("none")}, {"centred", int64_t{0}}, {"eps", 1e-5},
                          {"gated", int64_t{0}}, {"trans_b", int64_t{1}}, {"weight_offset", 0.0}};
    ir::Attrs gated = plain, offset = plain, centred = plain;
    gated["gated"] = int64_t{1}, gated["activation"] = std::string("silu");
    offset["weight_offset"] = 1.0;
    centred["centred"] = int64_t{1}, centred["activation"] = std::string("gelu_tanh");
    for (int64_t k : {64, 896, 2048, 8192}) {
      const Operand norm = dense(t, {k}, true), none = absent();
      out.push_back({"linears",
                     {dense(t, {1, 1, k}), norm, none, none, weight(k, k), dense(t, {k}, true), weight(512, k), none,
                      weight(513, k), dense(t, {513}, true)},
                     {dense(t, {1, 1, k}), dense(t, {1, 1, 512}), dense(t, {1, 1, 513})}, plain});
      out.push_back({"linears", {dense(t, {1, k}), norm, none, none, weight(4864, k), none, weight(4864, k), none},
                     {dense(t, {1, 4864})}, gated});
      out.push_back({"linears", {dense(t, {1, k}), norm, none, dense(t, {1, 300}), weight(300, k), none},
                     {dense(t, {1, 300})}, offset});
      out.push_back({"linears", {dense(t, {3, 1, k}), norm, none, dense(t, {3, 1, 300}), weight(300, k), none},
                     {dense(t, {3, 1, 300})}, offset});
      out.push_back({"linears", {dense(t, {1, 1, k}), norm, norm, none, weight(300, k), dense(t, {300}, true)},
                     {dense(t, {1, 1, 300})}, centred});
      centred["activation"] = std::string("none");
      out.push_back({"linears", {dense(t, {1, k}), norm, none, dense(t, {1, 300}), weight(300, k), none},
                     {dense(t, {1, 300})}, centred});
      centred["activation"] = std::string("gelu_tanh"), centred["trans_b"] = int64_t{0};
      out.push_back({"linears", {dense(t, {1, 1, k}), norm, norm, none, weight(k, 304), dense(t, {304}, true)},
                     {dense(t, {1, 1, 304})}, centred});
      centred["trans_b"] = int64_t{1};
    }
    for (int64_t d : {64, 128, 256}) {
      for (bool masked : {false, true}) {
        for (int64_t batch : {1, 3}) {
          const auto heads = [&](int64_t n) {
            Operand out_of = dense(t, {batch, 1, n, d});
            out_of.layout = ir::view_permute(out_of.layout, {0, 2, 1, 3});
            return out_of;
          };
          Operand angles = dense(t, {1, 1, 1, d}), mask = dense(DType::kBool, {batch, 1, 1, 1000});
          angles.layout = ir::view_expand(angles.layout, {batch, 8, 1, d});
          mask.layout = ir::view_expand(mask.layout, {batch, 8, 1, 1000});
          for (bool turned : {true, false}) {
            out.push_back({"append_sdpa",
                           {heads(8), heads(2), heads(2), turned ? angles : absent(), turned ? angles : absent(),
                            dense(DType::kI64, {1}), masked ? mask : absent()},
                           {heads(8), dense(t, {batch, 2, 1000, d}), dense(t, {batch, 2, 1000, d})},
                           {{"scale", 0.125}, {"ends", int64_t{masked ? 0 : 1}}}});
          }
        }
      }
    }
  }
}

void add_quantised(std::vector<Shape>& out) {
  for (int64_t bits : {4, 8}) {
    for (int64_t tile : {1, 8}) {
      for (int64_t rows : {1, 5, 16, 64}) {
        out.push_back(quant_linear(rows, 300, 512, bits, tile));
      }
      out.push_back(quant_linear(64, 300, 512, bits, tile, DType::kBF16));
      out.push_back({"quantize", {dense(DType::kF32, {300, 500}, true)},
                     {dense(bits == 8 ? DType::kI8 : DType::kU8, {300, 512 * bits / 8}),
                      dense(DType::kF16, {300, 16})},
                     {{"bits", bits}, {"group", int64_t{32}}, {"tile", tile}, {"symmetric", int64_t{1}}}});
    }
    for (DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (int64_t group : {32, 128}) {
        for (int64_t rows : {1, 5, 64}) out.push_back(quant_linear_pairs(rows, 300, 512, bits, group, t));
        out.push_back({"quantize", {dense(t, {300, 500}, true)},
                       {dense(bits == 8 ? DType::kI8 : DType::kU8, {300, 512 * bits / 8}),
                        dense(t, {(500 + group - 1) / group, 300})},
                       {{"bits", bits}, {"group", group}, {"pairs", int64_t{1}}, {"symmetric", int64_t{1}}}});
      }
    }
  }
}

void add_elementwise(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI64, DType::kI32}) {
    const bool is_float = t != DType::kI64 && t != DType::kI32;
    const int64_t cls = !is_float ? 2 : t == DType::kF64 ? 1 : 0;
    Operand row = dense(t, {768});
    row.layout = ir::view_expand(row.layout, {64, 128, 768});
    // x * y + row, with a broadcast operand.
    out.push_back({"ewise",
                   {dense(t, {64, 128, 768}), dense(t, {64, 128, 768}), row},
                   {dense(t, {64, 128, 768})},
                   {{"code", Ints{42, cls, 0, 1, -1, 40, cls, 3, 2, -1}}, {"imm", std::vector<double>{}}}});
    if (is_float) {
      out.push_back({"ewise", {dense(t, {7, 129})}, {dense(t, {7, 129})},
                     {{"code", Ints{14, cls, 0, -1, -1}}, {"imm", std::vector<double>{}}}});
    }
    Operand across = dense(t, {128, 70});
    across.layout = ir::view_permute(across.layout, {1, 0});
    out.push_back({"copy", {across}, {dense(t, {70, 128})}, {}});
  }
  out.push_back({"ewise", {}, {dense(DType::kF32, {5, 200})},
                 {{"code", Ints{0, 0, 0, -1, -1}}, {"imm", std::vector<double>{1.5}}}});
  out.push_back({"ewise", {dense(DType::kI64, {3, 99})}, {dense(DType::kF32, {3, 99})},
                 {{"code", Ints{1, 0, 0, -1, -1}}, {"imm", std::vector<double>{}}}});
  // Computed in float32, stored wider: the result is no better than float32.
  out.push_back({"ewise", {dense(DType::kF32, {7, 129})}, {dense(DType::kF64, {7, 129})},
                 {{"code", Ints{14, 0, 0, -1, -1}}, {"imm", std::vector<double>{}}}});
}

void add_rows(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const auto x = [&] { return dense(t, {3, 41, 771}); };
    const auto w = [&] { return dense(t, {771}, true); };
    out.push_back({"layer_norm", {x(), w(), w(), x()}, {x(), x()}, {{"eps", 1e-5}}});
    out.push_back({"rms_norm", {x(), w(), absent()}, {x()}, {{"eps", 1e-5}, {"weight_offset", 0.0}}});
    out.push_back({"softmax", {x()}, {x()}, {{"log", int64_t{0}}}});
    Operand cos = dense(t, {1, 1, 37, 64});
    cos.layout = ir::view_expand(cos.layout, {2, 4, 37, 64});
    out.push_back({"rope", {dense(t, {2, 4, 37, 64}), cos, cos}, {dense(t, {2, 4, 37, 64})},
                   {{"interleaved", int64_t{0}}}});
    out.push_back({"embedding", {dense(t, {50257, 771}, true), dense(DType::kI64, {4, 33})},
                   {dense(t, {4, 33, 771})}, {}});
    for (const char* kind : {"sum", "mean", "max", "prod", "argmax"}) {
      const DType to = std::string(kind) == "argmax" ? DType::kI64 : t;
      out.push_back({"reduce", {x()}, {dense(to, {3, 41, 1})}, {{"kind", std::string(kind)}, {"axes", Ints{2}}}});
      if (to == t) {
        out.push_back({"reduce", {x()}, {dense(to, {3, 1, 771})}, {{"kind", std::string(kind)}, {"axes", Ints{1}}}});
      }
    }
    out.push_back({"cumsum", {x()}, {x()}, {{"axis", int64_t{2}}}});
    for (const char* kind : {"prod", "max", "min", "logsumexp"}) {
      out.push_back({"scan", {x()}, {x()}, {{"axis", int64_t{2}}, {"kind", std::string(kind)}}});
    }
    if (t == DType::kF32 || t == DType::kF64) {
      out.push_back({"check", {dense(DType::kBool, {})}, {dense(DType::kBool, {})}, {}});
      out.push_back({"uniform", {dense(DType::kI64, {2})}, {x()}, {}});
      out.push_back({"adam", {x(), x(), x(), x(), dense(t, {8})}, {x(), x(), x()},
                     {{"decay", std::string("gradient")}, {"maximize", int64_t{1}}}});
      out.push_back({"adam", {x(), x(), x(), x(), dense(t, {8}), x(), dense(DType::kBool, {})},
                     {x(), x(), x(), x()}, {{"decay", std::string("parameter")}}});
    }
    out.push_back({"sort", {x()}, {x(), dense(DType::kI64, {3, 41, 771})},
                   {{"axis", int64_t{2}}, {"descending", int64_t{1}}, {"k", int64_t{-1}}}});
    out.push_back({"sort", {x()}, {dense(t, {3, 41, 50}), dense(DType::kI64, {3, 41, 50})},
                   {{"axis", int64_t{2}}, {"descending", int64_t{1}}, {"k", int64_t{50}}}});
  }
}

void add_lookups(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kI64}) {
    out.push_back({"gather", {dense(t, {9, 777}), dense(DType::kI64, {9, 33})}, {dense(t, {9, 33})},
                   {{"axis", int64_t{1}}}});
    out.push_back({"index", {dense(t, {6, 500, 70}), dense(DType::kI64, {11})}, {dense(t, {6, 11, 70})},
                   {{"axes", Ints{1}}}});
    out.push_back({"index", {dense(t, {6, 500, 70}), dense(DType::kI64, {11, 3}), dense(DType::kI64, {11, 3})},
                   {dense(t, {11, 3, 70})}, {{"axes", Ints{0, 1}}}});
    out.push_back({"index_copy", {dense(DType::kI64, {5}), dense(t, {2, 4, 5, 64})}, {dense(t, {2, 4, 300, 64})},
                   {{"axis", int64_t{2}}}});
    for (const char* kind : {"set", "add", "mul", "max", "min"}) {
      out.push_back({"scatter", {dense(t, {9, 777}), dense(DType::kI64, {9, 33}), dense(t, {9, 33})},
                     {dense(t, {9, 777})}, {{"axis", int64_t{1}}, {"kind", std::string(kind)}}});
    }
  }
}

/// As models of images have them: channels last in memory.
Operand image(DType t, Ints dims) {
  Ints order{0}, back{0, static_cast<int64_t>(dims.size()) - 1};
  for (size_t d = 2; d < dims.size(); ++d) order.push_back(static_cast<int64_t>(d));
  order.push_back(1);
  for (size_t d = 1; d + 1 < dims.size(); ++d) back.push_back(static_cast<int64_t>(d));
  Ints stored;
  for (int64_t axis : order) stored.push_back(dims[static_cast<size_t>(axis)]);
  Operand out = dense(t, stored);
  out.layout = ir::view_permute(out.layout, back);
  return out;
}

Shape conv(DType t, Ints x, Ints w, Ints y, ir::Attrs attrs, bool residual = false) {
  attrs.emplace("activation", std::string(residual ? "relu" : "none"));
  const int64_t channels = y[1];
  return {"conv",
          {image(t, x), dense(t, w, true), dense(t, {channels}, true), residual ? image(t, y) : absent()},
          {image(t, y)},
          attrs};
}

void add_images(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kF64}) {
    const Ints one{1, 1}, two{2, 2}, around{1, 1, 1, 1};
    out.push_back(conv(t, {4, 3, 224, 224}, {64, 3, 7, 7}, {4, 64, 112, 112},
                       {{"stride", two}, {"padding", Ints{3, 3, 3, 3}}, {"groups", int64_t{1}}}));
    out.push_back(conv(t, {1, 256, 56, 56}, {250, 256, 3, 3}, {1, 250, 56, 56},
                       {{"stride", one}, {"padding", around}, {"groups", int64_t{1}}}, true));
    out.push_back(conv(t, {2, 96, 57, 56}, {96, 1, 3, 3}, {2, 96, 29, 28},
                       {{"stride", two}, {"padding", around}, {"groups", int64_t{96}}}));
    out.push_back(conv(t, {2, 96, 15, 30}, {96, 24, 3, 3}, {2, 96, 15, 30},
                       {{"stride", one}, {"padding", around}, {"groups", int64_t{4}}}));
    out.push_back(conv(t, {1, 70, 31}, {70, 33, 4}, {1, 33, 62},
                       {{"stride", Ints{2}}, {"padding", Ints{1, 1}}, {"groups", int64_t{1}}, {"transposed", int64_t{1}}}));
    for (const char* kind : {"max", "mean"}) {
      out.push_back({"pool", {image(t, {2, 70, 112, 112})}, {image(t, {2, 70, 56, 56})},
                     {{"kind", std::string(kind)}, {"kernel", Ints{3, 3}}, {"stride", two}, {"padding", around}}});
    }
    out.push_back({"group_norm",
                   {image(t, {2, 320, 33, 64}), dense(t, {320}, true), dense(t, {320}, true)},
                   {image(t, {2, 320, 33, 64})},
                   {{"groups", int64_t{32}}, {"eps", 1e-5}, {"activation", std::string("silu")}}});
    for (const char* mode : {"nearest", "linear"}) {
      out.push_back({"resize", {image(t, {2, 70, 32, 32})}, {image(t, {2, 70, 64, 70})},
                     {{"mode", std::string(mode)}, {"ratio", std::vector<double>{0.5, 32.0 / 70}}, {"align_corners", int64_t{0}}}});
    }
  }
}

void add_recurrent(std::vector<Shape>& out) {
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [cell, gates] : {std::pair<const char*, int64_t>{"lstm", 4}, {"gru", 3}, {"tanh", 1}, {"relu", 1}}) {
      const bool lstm = gates == 4;
      out.push_back({"recurrent",
                     {dense(t, {50, 9, gates * 300}), dense(t, {gates * 300, 300}, true), dense(t, {9, 300}),
                      lstm ? dense(t, {9, 300}) : absent(), dense(t, {gates * 300}, true)},
                     {dense(t, {50, 9, 300}), dense(t, {9, 300})},
                     {{"cell", std::string(cell)}, {"reverse", int64_t{0}}, {"batch_first", int64_t{0}}}});
      if (lstm) out.back().outputs.push_back(dense(t, {9, 300}));
    }
    out.push_back({"recurrent",
                   {dense(t, {3, 70, 4 * 257}), dense(t, {4 * 257, 100}, true), dense(t, {3, 100}), dense(t, {3, 257}),
                    absent(), dense(t, {100, 257}, true)},
                   {dense(t, {3, 70, 100}), dense(t, {3, 100}), dense(t, {3, 257})},
                   {{"cell", std::string("lstm")}, {"reverse", int64_t{1}}, {"batch_first", int64_t{1}}}});
  }
}

}  // namespace

std::vector<Shape> problems() {
  std::vector<Shape> out;
  add_products(out);
  add_fused(out);
  add_quantised(out);
  add_elementwise(out);
  add_rows(out);
  add_lookups(out);
  add_images(out);
  add_recurrent(out);
  return out;
}

}  // namespace rm::selfcheck_test
