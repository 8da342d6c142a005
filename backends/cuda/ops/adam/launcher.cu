// The table of adam: checks and launches, 32 parameters each.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "adam/kernels/adam_any.cuh"

namespace rm::cuda_ops {
namespace {

template <int kDecay>
void start(const AdamArgs& a, bool largest, unsigned blocks, Stream stream) {
  if (largest) {
    adam_update_elements<kDecay, true><<<blocks, 256, 0, stream>>>(a);
  } else {
    adam_update_elements<kDecay, false><<<blocks, 256, 0, stream>>>(a);
  }
}

bool in_vectors(const AdamPointers& t) {
  std::uintptr_t all = 0;
  for (const void* x : {static_cast<const void*>(t.p), static_cast<const void*>(t.g),
                        static_cast<const void*>(t.m), static_cast<const void*>(t.v),
                        static_cast<const void*>(t.largest), static_cast<const void*>(t.new_p),
                        static_cast<const void*>(t.new_m), static_cast<const void*>(t.new_v),
                        static_cast<const void*>(t.new_largest)}) {
    all |= reinterpret_cast<std::uintptr_t>(x);
  }
  return all % 16 == 0;
}

Status launch_any(const AdamUpdate& p, Workspace, Stream stream) {
  AdamArgs a{};
  a.numbers = static_cast<const float*>(p.numbers.data), a.number_step = p.numbers.stride[0];
  a.apply = p.has_apply ? static_cast<const bool*>(p.apply.data) : nullptr;
  a.maximize = p.maximize;
  std::int64_t blocks = 0;
  const auto flush = [&]() -> Status {
    if (a.tensors == 0) return {};
    const auto count = static_cast<unsigned>(blocks);
    switch (p.decay) {
      case AdamDecay::none:
        start<static_cast<int>(AdamDecay::none)>(a, p.has_largest, count, stream);
        break;
      case AdamDecay::gradient:
        start<static_cast<int>(AdamDecay::gradient)>(a, p.has_largest, count, stream);
        break;
      case AdamDecay::parameter:
        start<static_cast<int>(AdamDecay::parameter)>(a, p.has_largest, count, stream);
        break;
    }
    a.tensors = 0, blocks = 0;
    return launch_status("adam");
  };
  for (const AdamTensors& t : p.tensors) {
    const std::int64_t size = numel(t.p), wanted = ceil_div(size, kAdamElements);
    if (size == 0) continue;
    if (a.tensors == kAdamTensors || blocks + wanted > 0x7fffffff) {
      if (Status s = flush(); !s) return s;
    }
    AdamPointers& to = a.tensor[a.tensors++];
    const auto in = [](const Tensor& x) { return static_cast<const float*>(x.data); };
    const auto out = [](const Tensor& x) { return static_cast<float*>(x.data); };
    to = {in(t.p), in(t.g), in(t.m), in(t.v), p.has_largest ? in(t.largest) : nullptr,
          out(t.new_p), out(t.new_m), out(t.new_v), p.has_largest ? out(t.new_largest) : nullptr,
          size, static_cast<int>(blocks), false};
    to.vectors = in_vectors(to);
    blocks += wanted;
  }
  return flush();
}

double cost(const AdamUpdate& p) {
  double bytes = 0;
  for (const AdamTensors& t : p.tensors) {
    bytes += static_cast<double>(numel(t.p)) * 4 * (p.has_largest ? 9 : 7);
  }
  return move_us(bytes);
}

constexpr KernelRow<AdamUpdate> kRows[] = {
    {"adam_update_any", "any problem", [](const AdamUpdate&) -> const char* { return nullptr; },
     cost, launch_any},
};

}  // namespace

std::span<const KernelRow<AdamUpdate>> adam_update_rows() { return kRows; }

Status legal(const AdamUpdate& p) {
  bool ok = p.numbers.dtype == DType::f32 && p.numbers.rank == 1 && p.numbers.shape[0] == 8 &&
            (!p.has_apply || (p.apply.dtype == DType::boolean && numel(p.apply) == 1));
  std::vector<Operand> results, operands{{"numbers", &p.numbers}};
  if (p.has_apply) operands.push_back({"apply", &p.apply});
  for (const AdamTensors& t : p.tensors) {
    const auto fits = [&](const Tensor& x) {
      return x.dtype == DType::f32 && is_contiguous(x) && numel(x) == numel(t.p);
    };
    for (const Tensor* x : {&t.p, &t.g, &t.m, &t.v, &t.new_p, &t.new_m, &t.new_v}) ok = ok && fits(*x);
    if (p.has_largest) ok = ok && fits(t.largest) && fits(t.new_largest);
    operands.push_back({"gradient", &t.g});
    const std::pair<const Tensor*, const Tensor*> pairs[] = {
        {&t.p, &t.new_p}, {&t.m, &t.new_m}, {&t.v, &t.new_v}, {&t.largest, &t.new_largest}};
    for (const auto& [from, to] : std::span(pairs).first(p.has_largest ? 4 : 3)) {
      results.push_back({"a result", to});
      if (from->data != to->data) operands.push_back({"a state", from});  // else in place
    }
  }
  if (!ok) {
    return invalid(
        "[adam] expected dense float32 tensors of one size for each parameter and numbers [8], got "
        "others");
  }
  return check_many_dense("adam", results, operands);
}

Status adam_update(const AdamUpdate& p, const char* kernel, Stream stream) {
  if (p.tensors.empty()) return {};
  if (Status s = legal(p); !s) return s;
  const KernelRow<AdamUpdate>* row = nullptr;
  if (Status s = select_row<AdamUpdate>("adam", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
