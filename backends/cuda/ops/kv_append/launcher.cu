// The table of kv_append: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "kv_append/api.hpp"
#include "kv_append/kernels/kv_append_any.cuh"

namespace rm::cuda_ops {
namespace {

inline constexpr std::int64_t kMostAtOnce = 0x7fff0000;  // of a launch, what counters hold

template <class E>
Status launch(const KvAppend& p, Workspace, Stream stream) {
  const int per = static_cast<int>(sizeof(E)) / size_of(p.k.dtype);
  KvAppendArgs a{};
  a.k = p.k.data, a.v = p.v.data, a.k_cache = p.k_cache.data, a.v_cache = p.v_cache.data;
  a.positions = p.positions.data, a.wide_positions = p.positions.dtype == DType::i64;
  const Tensor* tensors[] = {&p.k, &p.v, &p.k_cache, &p.v_cache};
  for (int t = 0; t < 4; ++t) {
    for (int d = 0; d < 3; ++d) a.stride[t][d] = tensors[t]->stride[d] / per;
  }
  a.by_row = FastDivisor(static_cast<std::uint32_t>(p.k.shape[3] / per));
  a.by_rows = FastDivisor(static_cast<std::uint32_t>(p.k.shape[2]));
  a.by_groups = FastDivisor(static_cast<std::uint32_t>(p.k.shape[1]));
  a.slots = static_cast<int>(p.k_cache.shape[2]);
  const std::int64_t images = p.k.shape[0], image = numel(p.k) / images / per;
  const std::int64_t at_once = kMostAtOnce / image;
  for (std::int64_t first = 0; first < images; first += at_once) {
    a.first = static_cast<int>(first);
    a.total = static_cast<int>(std::min(at_once, images - first) * image);
    const auto blocks = static_cast<unsigned>(ceil_div(a.total, 256 * kKvAppendPacks));
    kv_append_rows_any<E><<<blocks, 256, 0, stream>>>(a);
  }
  return launch_status("kv_append");
}

Status launch_element(const KvAppend& p, Workspace w, Stream stream) {
  return size_of(p.k.dtype) == 2 ? launch<std::uint16_t>(p, w, stream)
                                 : launch<std::uint32_t>(p, w, stream);
}

const char* too_long(const KvAppend& p, int per) {
  return numel(p.k) / p.k.shape[0] / per > kMostAtOnce ? "2^31 pieces or more of one sequence"
                                                       : nullptr;
}

const char* vector_why_not(const KvAppend& p) {
  const int per = 16 / size_of(p.k.dtype);
  if (const char* why = too_long(p, per)) return why;
  if (p.k.shape[3] % per != 0) return "rows are not whole 16-byte vectors";
  for (const Tensor* t : {&p.k, &p.v, &p.k_cache, &p.v_cache}) {
    if (reinterpret_cast<std::uintptr_t>(t->data) % 16 != 0) return "a tensor is not aligned";
    for (int d = 0; d < 3; ++d) {
      if (t->shape[d] > 1 && t->stride[d] % per != 0) return "rows are not 16-byte aligned";
    }
  }
  return nullptr;
}

double cost(const KvAppend& p, double factor) {
  return factor * move_us(4.0 * static_cast<double>(numel(p.k)) * size_of(p.k.dtype));
}

constexpr KernelRow<KvAppend> kRows[] = {
    {"kv_append_vector_sm80", "rows of whole 16-byte vectors", vector_why_not,
     [](const KvAppend& p) { return cost(p, 1); }, launch<uint4>},
    {"kv_append_naive_any", "any problem", [](const KvAppend& p) { return too_long(p, 1); },
     [](const KvAppend& p) { return cost(p, 4); }, launch_element},
};

Status check(const KvAppend& p) {
  const bool sizes = p.k.rank == 4 && same_shape(p.k, p.v) && p.k_cache.rank == 4 &&
                     same_shape(p.k_cache, p.v_cache) && p.k.shape[0] == p.k_cache.shape[0] &&
                     p.k.shape[1] == p.k_cache.shape[1] && p.k.shape[3] == p.k_cache.shape[3];
  if (!sizes) {
    return invalid("[kv_append] expected k, v [B, G, S, D] and caches [B, G, T, D], got others");
  }
  for (const Tensor* t : {&p.k, &p.v, &p.k_cache, &p.v_cache}) {
    if (!is_float(t->dtype) || t->dtype != p.k.dtype || (t->shape[3] > 1 && t->stride[3] != 1)) {
      return invalid("[kv_append] expected one float dtype and dense last axes, got " +
                     std::string(name_of(t->dtype)));
    }
  }
  if (p.positions.rank != 1 || p.positions.shape[0] != p.k.shape[0] ||
      !is_contiguous(p.positions) ||
      (p.positions.dtype != DType::i32 && p.positions.dtype != DType::i64)) {
    return invalid("[kv_append] expected positions [B] of int32 or int64, dense, got " +
                   std::string(name_of(p.positions.dtype)));
  }
  return check_memory("kv_append", {{"k_cache", &p.k_cache}, {"v_cache", &p.v_cache}},
                      {{"k", &p.k}, {"v", &p.v}, {"positions", &p.positions}});
}

}  // namespace

std::span<const KernelRow<KvAppend>> kv_append_rows() { return kRows; }

Status kv_append(const KvAppend& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.k) == 0 || numel(p.k_cache) == 0) return {};
  const KernelRow<KvAppend>* row = nullptr;
  if (Status s = select_row<KvAppend>("kv_append", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
