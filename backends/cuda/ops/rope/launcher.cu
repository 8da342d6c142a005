// The table of rope: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "rope/api.hpp"
#include "rope/kernels/rope_any.cuh"

namespace rm::cuda_ops {
namespace {

template <int kV>
Status launch(const Rope& p, Workspace, Stream stream) {
  RopeArgs a{};
  a.x = p.x.data, a.cos = p.cos.data, a.sin = p.sin.data, a.y = p.y.data;
  const Tensor* tensors[] = {&p.x, &p.cos, &p.sin, &p.y};
  for (int d = 0; d < 3; ++d) {
    a.shape[d] = p.x.shape[d];
    for (int t = 0; t < 4; ++t) a.stride[t][d] = tensors[t]->stride[d];
  }
  a.half = static_cast<int>(p.x.shape[3] / 2);
  a.interleaved = p.interleaved, a.backward = p.backward;
  dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = std::min(kV, 16 / static_cast<int>(sizeof(T)));
    const auto blocks = static_cast<unsigned>(ceil_div(numel(p.x) / 2 / V, 256));
    if (p.cos.dtype == DType::f32) {
      rope_pairs<T, float, V><<<blocks, 256, 0, stream>>>(a);
    } else {
      rope_pairs<T, T, V><<<blocks, 256, 0, stream>>>(a);
    }
  });
  return launch_status("rope");
}

const char* vector_why_not(const Rope& p) {
  if (p.interleaved) return "pairs are interleaved";
  if (p.x.shape[3] % 16 != 0) return "the halves are not whole vectors";
  for (const Tensor* t : {&p.x, &p.cos, &p.sin, &p.y}) {
    if (reinterpret_cast<std::uintptr_t>(t->data) % 32 != 0)
      return "a tensor is not 32-byte aligned";
    for (int d = 0; d < 3; ++d) {
      if (t->shape[d] > 1 && t->stride[d] % 8 != 0) return "rows are not whole vectors";
    }
  }
  return nullptr;
}

double cost(const Rope& p, double factor) {
  return factor * move_us(2.0 * static_cast<double>(numel(p.x)) * size_of(p.x.dtype));
}

constexpr KernelRow<Rope> kRows[] = {
    {"rope_vector_sm80", "halves of whole 8-element vectors, aligned", vector_why_not,
     [](const Rope& p) { return cost(p, 1); }, launch<8>},
    {"rope_naive_any", "any problem", [](const Rope&) -> const char* { return nullptr; },
     [](const Rope& p) { return cost(p, 3); }, launch<1>},
};

Status check(const Rope& p) {
  if (p.x.rank != 4 || !is_float(p.x.dtype) || p.x.shape[3] % 2 != 0 || p.x.shape[3] > 1 << 20) {
    return invalid("[rope] expected x [B, H, S, D] of float32, bfloat16 or float16, D even, got " +
                   std::string(name_of(p.x.dtype)) + " of rank " + std::to_string(p.x.rank));
  }
  for (const Tensor* t : {&p.x, &p.cos, &p.sin, &p.y}) {
    const bool table = t == &p.cos || t == &p.sin;
    if (!same_shape(*t, p.x) || t->stride[3] != 1 || (table && t->dtype != p.cos.dtype) ||
        (t->dtype != p.x.dtype && !(table && t->dtype == DType::f32))) {
      return invalid(
          "[rope] expected cos, sin and y of x's shape (cos and sin may broadcast) with a dense "
          "last "
          "axis, of x's dtype (cos and sin also float32), got " +
          std::string(name_of(t->dtype)) + " of rank " + std::to_string(t->rank) + "; try expand");
    }
  }
  return check_memory("rope", {{"y", &p.y, true}},
                      {{"x", &p.x, true}, {"cos", &p.cos}, {"sin", &p.sin}});
}

}  // namespace

std::span<const KernelRow<Rope>> rope_rows() { return kRows; }
Status legal(const Rope& p) { return check(p); }

Status rope(const Rope& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Rope>* row = nullptr;
  if (Status s = select_row<Rope>("rope", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
