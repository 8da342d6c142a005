// The table of optim: checks, choice and launches, 64 tensors each.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "optim/api.hpp"
#include "optim/kernels/optim_any.cuh"

namespace rm::cuda_ops {
namespace {

bool in_vectors(const Optim& p) {
  for (const OptimTensors& t : p.tensors) {
    if (numel(t.param) % 8 != 0) return false;
    for (const Tensor* x : {&t.param, &t.grad, t.m, t.v}) {
      if (x && reinterpret_cast<std::uintptr_t>(x->data) % 32 != 0) return false;
    }
  }
  return true;
}

bool few_elements(const Optim& p) {
  std::int64_t total = 0;
  for (const OptimTensors& t : p.tensors) total += numel(t.param);
  return total <= 64 * 1024;
}

DType state_type(const Optim& p) { return p.tensors[0].m ? p.tensors[0].m->dtype : DType::f32; }

OptimSettings settings_of(const Optim& p) {
  OptimSettings a{};
  a.kind = static_cast<int>(p.kind), a.beta1 = p.beta1, a.beta2 = p.beta2;
  a.first_share = static_cast<float>(1.0 - p.beta1), a.second_beta = static_cast<float>(p.beta2);
  a.second_share = static_cast<float>(1.0 - p.beta2);
  a.lr = static_cast<float>(p.lr), a.eps = static_cast<float>(p.eps);
  a.weight_decay = static_cast<float>(p.weight_decay), a.decay_factor = a.lr * a.weight_decay;
  a.momentum = static_cast<float>(p.momentum), a.nesterov = p.nesterov;
  if (p.device_step) {
    a.device_step = p.device_step->data;
    a.step_is_float = p.device_step->dtype == DType::f32;
  } else {
    a.factors = optim_factors(a, static_cast<double>(p.step));
  }
  return a;
}

template <class T, class S, int kV, int kTensors, bool kStates>
Status launch_all(const Optim& p, Stream stream) {
  OptimArgs<kTensors> a{};
  a.settings = settings_of(p);
  // short blocks hide behind each other; with two operands of 16 bits their beginnings do not
  int elements = !kStates && sizeof(T) == 2 ? 2 * kOptimElements : kOptimElements;
  if (kV == 1 && few_elements(p)) elements = 256;  // an element a thread
  a.settings.elements = elements;
  std::int64_t blocks = 0;
  const auto flush = [&]() -> Status {
    if (a.tensors == 0) return {};
    a.first_block[a.tensors] = static_cast<int>(blocks);
    optim_step<T, S, kV, kTensors, kStates><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(a);
    a.tensors = 0, blocks = 0;
    return launch_status("optim");
  };
  for (const OptimTensors& t : p.tensors) {
    const std::int64_t size = numel(t.param), wanted = ceil_div(size, elements);
    if (size == 0) continue;
    if (a.tensors == kTensors || blocks + wanted > 0x7fffffff) {
      if (Status s = flush(); !s) return s;
    }
    const int i = a.tensors++;
    a.param[i] = t.param.data, a.grad[i] = t.grad.data, a.size[i] = size;
    a.m[i] = t.m ? t.m->data : nullptr, a.v[i] = t.v ? t.v->data : nullptr;
    a.first_block[i] = static_cast<int>(blocks);
    blocks += wanted;
  }
  return flush();
}

template <class T, class S, int kV, bool kStates>
Status launch_some(const Optim& p, Stream stream) {
  if (p.tensors.size() == 1) return launch_all<T, S, kV, 1, kStates>(p, stream);
  return launch_all<T, S, kV, kOptimTensors, kStates>(p, stream);
}

template <int kV>
Status launch(const Optim& p, Workspace, Stream stream) {
  return dispatch_float(p.tensors[0].param.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.tensors[0].m == nullptr) return launch_some<T, float, kV, false>(p, stream);
    if (state_type(p) == DType::f32) return launch_some<T, float, kV, true>(p, stream);
    return launch_some<T, T, kV, true>(p, stream);
  });
}

Status launch_vector(const Optim& p, Workspace w, Stream stream) {
  // the latency of 8 elements a thread would show
  return few_elements(p) ? launch<1>(p, w, stream) : launch<8>(p, w, stream);
}

double cost(const Optim& p, double factor) {
  double bytes = 0;
  for (const OptimTensors& t : p.tensors) {
    bytes += static_cast<double>(numel(t.param)) * size_of(t.param.dtype) * 3;
    for (const Tensor* x : {t.m, t.v})
      bytes += x ? 2.0 * static_cast<double>(numel(*x)) * size_of(x->dtype) : 0;
  }
  return factor * move_us(bytes);
}

constexpr KernelRow<Optim> kRows[] = {
    {"optim_vector_sm80", "sizes in eights, aligned",
     [](const Optim& p) -> const char* {
       return in_vectors(p) ? nullptr : "a tensor is not in aligned vectors of 8";
     },
     [](const Optim& p) { return cost(p, 1); }, launch_vector},
    {"optim_naive_any", "any problem", [](const Optim&) -> const char* { return nullptr; },
     [](const Optim& p) { return cost(p, 3); }, launch<1>},
};

Status check(const Optim& p) {
  const bool adam = p.kind != Optimiser::sgd;
  for (const OptimTensors& t : p.tensors) {
    const bool state = adam ? t.m && t.v : (t.m != nullptr) == (p.momentum != 0) && !t.v;
    if (!state) {
      return invalid(adam ? "[optim] expected m and v with adam, got none"
                          : "[optim] expected m exactly where momentum is not 0");
    }
    for (const Tensor* x : {&t.param, &t.grad, t.m, t.v}) {
      if (x == nullptr) continue;
      const bool is_state = x == t.m || x == t.v;
      if (!is_float(x->dtype) || !is_contiguous(*x) || numel(*x) != numel(t.param) ||
          x->dtype != (is_state ? state_type(p) : p.tensors[0].param.dtype) ||
          (is_state && x->dtype != DType::f32 && x->dtype != t.param.dtype)) {
        return invalid(
            "[optim] expected dense tensors of one size, param and grad of one float dtype, "
            "m and v of it or float32, got " +
            std::string(name_of(x->dtype)) + " with " + std::to_string(numel(*x)) + " elements");
      }
    }
  }
  std::vector<Operand> results, operands{{"step", p.device_step}};
  for (const OptimTensors& t : p.tensors) {
    results.insert(results.end(), {{"param", &t.param}, {"m", t.m}, {"v", t.v}});
    operands.push_back({"grad", &t.grad});
  }
  if (Status s = check_many_dense("optim", results, operands); !s) return s;
  if (p.device_step && (numel(*p.device_step) != 1 || (p.device_step->dtype != DType::i64 &&
                                                       p.device_step->dtype != DType::f32))) {
    return invalid("[optim] expected step of one element, int64 or float32, got another");
  }
  return {};
}

}  // namespace

std::span<const KernelRow<Optim>> optim_rows() { return kRows; }

Status optim(const Optim& p, const char* kernel, Stream stream) {
  if (p.tensors.empty()) return {};
  if (Status s = check(p); !s) return s;
  const KernelRow<Optim>* row = nullptr;
  if (Status s = select_row<Optim>("optim", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
