// Fills in the kernel rows: own packed kernels by instruction set, then the plain loop.
#include "ops/gemm/rows.hpp"

#include <stdexcept>
#include <string>
#include <vector>

#include "common/row.hpp"
#include "ops/gemm/cost.hpp"
#include "ops/gemm/naive.hpp"
#include "ops/gemm/packed.hpp"

namespace rm::cpu {

namespace gemm {
RM_CPU_TABLE(KernelSet, gemm_kernels)

namespace {

/// Throughput of one thread, GFLOP/s, by level: only orders the rows.
constexpr double kPackedGflops[] = {15, 90, 130};

template <Isa kIsa>
struct PackedRow {
  static const PackedGemm* self(const rm_kernel_state* s) {
    return reinterpret_cast<const PackedGemm*>(s);
  }

  static int supports(const rm_problem* p, const rm_device_info*, rm_str* why_not) {
    const char* why = nullptr;
    if (!supported(kIsa)) {
      why = "this machine (or the option cpu_isa) has no such instruction set";
    } else {
      // decode() throws for operands outside the schema: a malformed problem is a no.
      try {
        why = PackedGemm::reject(decode(*p));
      } catch (const std::invalid_argument&) {
        why = "the problem does not match the operator's schema";
      }
    }
    if (why && why_not) *why_not = plugin::str(why);
    return why == nullptr;
  }

  static double cost_ns(const rm_problem* p, const rm_device_info*, uint32_t) {
    try {
      return roofline_ns(decode(*p), {kPackedGflops[static_cast<int>(kIsa)], 500, 0.4});
    } catch (const std::invalid_argument&) {
      return 1e18;
    }
  }

  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard([&] {
      GemmProblem g = decode(*p);
      if (const char* why = PackedGemm::reject(g)) throw std::invalid_argument(why);
      const KernelSet& kernels = *RM_CPU_PICK(kIsa, gemm_kernels);
      *out = reinterpret_cast<rm_kernel_state*>(new PackedGemm(std::move(g), kernels));
    });
  }

  static void release(rm_kernel_state* s) { delete self(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return self(s)->workspace_bytes(); }

  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, 64, 0, {}};
    if (input != kB || !self(s)->prepacked()) return;
    out->bytes = self(s)->packed_bytes();
    out->layout = plugin::str(self(s)->layout());
  }

  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* src,
                            void* dst) {
    return plugin::guard([&] {
      if (input != kB || !self(s)->prepacked()) {
        throw std::invalid_argument("[gemm] expected operand 1 to prepack, got " +
                                    std::to_string(input));
      }
      self(s)->prepack(static_cast<const char*>(src->data) + src->byte_offset, dst);
    });
  }

  static rm_status* launch(const rm_launch* l) {
    self(l->state)->launch(*l);
    return nullptr;
  }
};

struct NaiveRow {
  static const NaiveGemm* self(const rm_kernel_state* s) {
    return reinterpret_cast<const NaiveGemm*>(s);
  }
  static int supports(const rm_problem* p, const rm_device_info*, rm_str* why_not) {
    try {
      decode(*p);
      return 1;
    } catch (const std::invalid_argument&) {
      if (why_not) *why_not = plugin::str("the problem does not match the operator's schema");
      return 0;
    }
  }
  static double cost_ns(const rm_problem* p, const rm_device_info*, uint32_t) {
    try {
      return roofline_ns(decode(*p), {0.5, 500, 0});
    } catch (const std::invalid_argument&) {
      return 1e18;
    }
  }
  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard(
        [&] { *out = reinterpret_cast<rm_kernel_state*>(new NaiveGemm(decode(*p))); });
  }
  static void release(rm_kernel_state* s) { delete self(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return self(s)->workspace_bytes(); }
  static rm_status* launch(const rm_launch* l) {
    self(l->state)->launch(*l);
    return nullptr;
  }
};

template <class Row>
rm_kernel base_row(const char* name, uint32_t traits) {
  rm_kernel row{};
  row.struct_size = sizeof(row);
  row.op = plugin::str("gemm");
  row.name = plugin::str(name);
  row.digest = plugin::str(build_id());
  row.traits = traits;
  row.num_configs = 1;
  row.supports = Row::supports;
  row.cost_ns = Row::cost_ns;
  row.prepare = Row::prepare;
  row.release = Row::release;
  row.workspace = Row::workspace;
  row.launch = Row::launch;
  return row;
}

template <Isa kIsa>
rm_kernel packed_row(const char* name) {
  rm_kernel row = base_row<PackedRow<kIsa>>(name, RM_KERNEL_DETERMINISTIC);
  row.packing = PackedRow<kIsa>::packing;
  row.prepack = PackedRow<kIsa>::prepack;
  return row;
}

}  // namespace
}  // namespace gemm

std::span<const rm_kernel> gemm_rows() {
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    gemm::packed_row<Isa::avx512>("gemm_packed_avx512"),
    gemm::packed_row<Isa::avx2>("gemm_packed_avx2"),
#endif
    gemm::packed_row<Isa::baseline>("gemm_packed_baseline"),
    gemm::base_row<gemm::NaiveRow>("gemm_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)
  };
  return rows;
}

}  // namespace rm::cpu
