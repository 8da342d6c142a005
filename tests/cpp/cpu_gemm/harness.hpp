// Drives gemm rows of the built CPU plugin through the C ABI, as the core does: prepare, pack,
// launch. Shared by the tests and by benchmarks/cpp/gemm.cpp.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "rm/kernels.h"

namespace gemm_test {

// ---- element types ------------------------------------------------------------------------------

inline constexpr DLDataType kF32{kDLFloat, 32, 1}, kF64{kDLFloat, 64, 1}, kBF16{kDLBfloat, 16, 1},
    kF16{kDLFloat, 16, 1}, kI64{kDLInt, 64, 1}, kI32{kDLInt, 32, 1}, kI8{kDLInt, 8, 1};

/// Half of the distance between 1 and the next number; 0 for integers.
inline double unit_roundoff(DLDataType t) {
  if (t.code == kDLBfloat) return 0x1p-8;
  if (t.code != kDLFloat) return 0;
  return t.bits == 16 ? 0x1p-11 : t.bits == 32 ? 0x1p-24 : 0x1p-53;
}

inline double get(DLDataType t, const void* base, int64_t i) {
  const auto* bytes = static_cast<const char*>(base) + i * (t.bits / 8);
  if (t.code == kDLBfloat || (t.code == kDLFloat && t.bits == 16)) {
    uint16_t h;
    std::memcpy(&h, bytes, 2);
    if (t.code == kDLBfloat) {
      const uint32_t bits = uint32_t{h} << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    }
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double sign = h & 0x8000 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign *
           (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
  }
  const auto as = [&](auto x) {
    std::memcpy(&x, bytes, sizeof x);
    return static_cast<double>(x);
  };
  if (t.code == kDLFloat) return t.bits == 64 ? as(double{}) : as(float{});
  return t.bits == 64 ? as(int64_t{}) : t.bits == 32 ? as(int32_t{}) : as(int8_t{});
}

inline void set(DLDataType t, void* base, int64_t i, double x) {
  auto* bytes = static_cast<char*>(base) + i * (t.bits / 8);
  const auto as = [&](auto y) { std::memcpy(bytes, &y, sizeof y); };
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (t.code == kDLBfloat) {
    as(static_cast<uint16_t>(f != f ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16));
  } else if (t.code == kDLFloat && t.bits == 16) {
    // Test data is either special or well inside f16's normal range.
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return as(static_cast<uint16_t>(0x7e00));
    if (std::isinf(x)) return as(static_cast<uint16_t>(sign | 0x7c00));
    if (std::fabs(x) < 0x1p-14) return as(sign);
    const int exponent = std::ilogb(x);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent)));
    as(static_cast<uint16_t>(sign | (((exponent + 15) << 10) + units - 1024)));
  } else if (t.code == kDLFloat) {
    if (t.bits == 64)
      as(x);
    else
      as(f);
  } else if (t.bits == 64) {
    as(static_cast<int64_t>(x));
  } else if (t.bits == 32) {
    as(static_cast<int32_t>(x));
  } else {
    as(static_cast<int8_t>(x));
  }
}

// ---- tensors ------------------------------------------------------------------------------------

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, Free>;

/// Large blocks start on a huge page and ask for them, as the core does for weights.
inline Memory allocate(uint64_t bytes) {
  const uint64_t align = bytes >= (2u << 20) ? 2u << 20 : 64;
  char* p = static_cast<char*>(std::aligned_alloc(align, (bytes + align) / align * align));
  if (!p) throw std::bad_alloc();
  if (align > 64) madvise(p, (bytes + align) / align * align, MADV_HUGEPAGE);
  return Memory(p);
}

struct Tensor {
  DLDataType dtype{};
  std::vector<int64_t> shape, strides;
  int64_t elements = 0;  // of the storage
  Memory memory;
  rm_tensor view{};

  /// `strides` may leave gaps; the storage reaches from the first to the last element.
  Tensor(DLDataType t, std::vector<int64_t> dims, std::vector<int64_t> steps)
      : dtype(t), shape(std::move(dims)), strides(std::move(steps)) {
    elements = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] > 0) elements += (shape[i] - 1) * strides[i];
    }
    memory = allocate(static_cast<uint64_t>(elements) * (t.bits / 8));
    view = {memory.get(),
            {kDLCPU, 0},
            static_cast<int32_t>(shape.size()),
            dtype,
            shape.data(),
            strides.data(),
            0};
  }
  Tensor(DLDataType t, const std::vector<int64_t>& dims) : Tensor(t, dims, dense(dims)) {}

  static std::vector<int64_t> dense(const std::vector<int64_t>& dims) {
    std::vector<int64_t> steps(dims.size());
    int64_t step = 1;
    for (size_t i = dims.size(); i-- > 0; step *= std::max<int64_t>(dims[i], 1)) steps[i] = step;
    return steps;
  }
  void* data() const { return memory.get(); }
  int64_t at(const std::vector<int64_t>& index) const {
    int64_t offset = 0;
    for (size_t i = 0; i < index.size(); ++i) offset += index[i] * strides[i];
    return offset;
  }
};

// ---- rows ---------------------------------------------------------------------------------------

inline std::string text(rm_str s) { return std::string(s.data, s.size); }

struct Status {
  rm_code code;
  std::string message;
};
inline rm_status* status_create(rm_code code, rm_str message, const char*, int) {
  return reinterpret_cast<rm_status*>(new Status{code, text(message)});
}
inline void check(rm_status* s) {
  if (!s) return;
  std::unique_ptr<Status> owned(reinterpret_cast<Status*>(s));
  throw std::runtime_error(owned->message);
}

/// The plugin's table. RM_TEST_ONEDNN names the oneDNN library to use where it is not installed in
/// a standard place; RM_CPU_ISA lowers the instruction set.
inline const rm_kernels& plugin_rows() {
  static const rm_kernels* table = [&] {
    static const rm_host_api host{
        sizeof(rm_host_api),
        RM_ABI_VERSION,
        0,
        status_create,
        [](rm_status* s) { delete reinterpret_cast<Status*>(s); },
        [](const rm_status* s) { return reinterpret_cast<const Status*>(s)->code; },
        [](const rm_status* s) {
          const auto& m = reinterpret_cast<const Status*>(s)->message;
          return rm_str{m.data(), m.size()};
        },
        [](int, rm_str) {}};
    void* library = dlopen(RM_CPU_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    const auto query =
        reinterpret_cast<rm_backend_query_fn>(dlsym(library, RM_BACKEND_QUERY_SYMBOL));
    const rm_backend_api* api = query(RM_ABI_VERSION, &host);
    std::vector<rm_option> options;
    const auto option = [&](std::string_view key, const char* variable) {
      const char* value = std::getenv(variable);
      if (value) options.push_back({{key.data(), key.size()}, {value, std::strlen(value)}});
    };
    option("onednn_path", "RM_TEST_ONEDNN");
    option("cpu_isa", "RM_CPU_ISA");
    check(api->initialize({options.data(), options.size()}));
    constexpr std::string_view kName = RM_KERNELS_EXTENSION;
    return static_cast<const rm_kernels*>(api->extension({kName.data(), kName.size()}));
  }();
  return *table;
}

inline std::vector<const rm_kernel*> gemm_rows() {
  const rm_kernels& table = plugin_rows();
  std::vector<const rm_kernel*> rows;
  for (size_t i = 0; i < table.count; ++i) {
    const auto* row = reinterpret_cast<const rm_kernel*>(reinterpret_cast<const char*>(table.rows) +
                                                         i * table.row_stride);
    if (text(row->op) == "gemm") rows.push_back(row);
  }
  return rows;
}

// ---- problems -----------------------------------------------------------------------------------

/// Operands by pointer: null where absent.
struct Problem {
  const Tensor *a, *b, *bias = nullptr, *residual = nullptr;
  Tensor* c;
  bool trans_b = true;
  std::string activation = "none";
  double alpha = 1.0;
  bool constant_b = true;
  bool pack_weights = true;
};

/// A row prepared for a problem, with its packed operand and workspace.
class Prepared {
 public:
  Prepared(const rm_kernel& row, const Problem& p) : row_(row), p_(p) {
    build();
    rm_str why{};
    if (!row.supports(&problem_, nullptr, &why)) {
      why_not_ = text(why);
      return;
    }
    check(row.prepare(&problem_, nullptr, 0, &state_));
    workspace_bytes_ = row.workspace ? row.workspace(state_) : 0;
    workspace_ = allocate(workspace_bytes_ + kGuardBytes);
    std::memset(workspace_.get() + workspace_bytes_, kGuard, kGuardBytes);
    if (row.packing && p.constant_b) {
      row.packing(state_, 1, &packing_);
      if (packing_.bytes) {
        packed_ = allocate(packing_.bytes + kGuardBytes);
        std::memset(packed_.get() + packing_.bytes, kGuard, kGuardBytes);
        check(row.prepack(state_, 1, &p.b->view, packed_.get()));
      }
    }
  }
  ~Prepared() { row_.release(state_); }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  bool supported() const { return state_ != nullptr; }
  const std::string& why_not() const { return why_not_; }
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  double cost_ns() const { return row_.cost_ns(&problem_, nullptr, 0); }
  std::string layout() const { return text(packing_.layout); }

  void launch() const { launch(packed_ ? packed_.get() : p_.b->data()); }
  void launch(const void* b) const {
    const void* inputs[] = {p_.a->data(), b, p_.bias ? p_.bias->data() : nullptr,
                            p_.residual ? p_.residual->data() : nullptr};
    void* outputs[] = {p_.c->data()};
    const rm_launch l{sizeof(rm_launch), state_, inputs, outputs, workspace_.get(), nullptr};
    check(row_.launch(&l));
  }
  /// No byte behind the workspace or the packed operand was written.
  bool workspace_kept() const {
    const auto kept = [](const char* guard) {
      for (size_t i = 0; i < kGuardBytes; ++i) {
        if (guard[i] != kGuard) return false;
      }
      return true;
    };
    return kept(workspace_.get() + workspace_bytes_) &&
           (!packed_ || kept(packed_.get() + packing_.bytes));
  }
  uint64_t packed_bytes() const { return packing_.bytes; }
  const void* packed() const { return packed_.get(); }

 private:
  static constexpr size_t kGuardBytes = 256;
  static constexpr char kGuard = 0x5a;
  void build() {
    const auto ref = [](const Tensor* t) { return t ? &t->view : nullptr; };
    inputs_[0] = ref(p_.a), inputs_[1] = ref(p_.b), inputs_[2] = ref(p_.bias);
    inputs_[3] = ref(p_.residual), outputs_[0] = ref(p_.c);
    const auto name = [](std::string_view s) { return rm_str{s.data(), s.size()}; };
    attrs_[0] = {
        sizeof(rm_attr), name("trans_b"), RM_ATTR_INT, 0, p_.trans_b ? 1 : 0, 0, {}, 0, 0, 0};
    attrs_[1] = {sizeof(rm_attr),
                 name("activation"),
                 RM_ATTR_STRING,
                 0,
                 0,
                 0,
                 {p_.activation.data(), p_.activation.size()},
                 0,
                 0,
                 0};
    attrs_[2] = {sizeof(rm_attr), name("alpha"), RM_ATTR_FLOAT, 0, 0, p_.alpha, {}, 0, 0, 0};
    const int64_t pack = p_.pack_weights ? 1 : 0;
    attrs_[3] = {sizeof(rm_attr), name("pack_weights"), RM_ATTR_INT, 0, pack, 0, {}, 0, 0, 0};
    problem_ = {sizeof(rm_problem), name("gemm"),           inputs_, 4, outputs_, 1, attrs_, 4,
                sizeof(rm_attr),    p_.constant_b ? 2u : 0u};
  }

  const rm_kernel& row_;
  Problem p_;
  const rm_tensor *inputs_[4], *outputs_[1];
  rm_attr attrs_[4];
  rm_problem problem_{};
  rm_packing packing_{};
  rm_kernel_state* state_ = nullptr;
  std::string why_not_;
  uint64_t workspace_bytes_ = 0;
  Memory workspace_, packed_;
};

}  // namespace gemm_test
