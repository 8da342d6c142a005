// kernel_row.hpp -- a row of rm/kernels.h from a C++ class. Rows for the CPU and for GPUs are made
// here, so that a refusal, an exception and a part that is missing mean the same everywhere.
//
// A Row says what one kernel takes:
//   using State = ...;                       // a prepared problem
//   static const char* why_not(const rm_problem&, const rm_device_info*);   // NULL: supported
//   static double cost_ns(const rm_problem&, const rm_device_info*);
//   static State* make(const rm_problem&, const rm_device_info*);           // owned by the caller
// and, where its loops work in blocks,
//   static std::span<const rm_edge> edges();
// A State runs it:
//   void launch(const rm_launch&) const;     // or rm_status*; allocates nothing where it succeeds
// and, each where it has one,
//   uint64_t workspace_bytes() const;
//   bool packs(size_t operand) const;        // whether it reads that operand in a layout of its own
// and for the operands that it packs
//   uint64_t packed_bytes(size_t operand) const;
//   std::string_view layout(size_t operand) const;
//   void prepack(size_t operand, const rm_tensor& source, void* packed) const;
//   static constexpr uint64_t kPackedAlignment;   // of `packed`; 64 bytes where it is left out
// All of them may throw. What why_not() returns lives until the thread's next call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "rm/kernels.h"
#include "rm/plugin.hpp"

namespace rm::plugin {

template <class Row>
struct RowEntries {
  using State = typename Row::State;
  static const State& state(const rm_kernel_state* s) { return *reinterpret_cast<const State*>(s); }

  static int supports(const rm_problem* problem, const rm_device_info* device, rm_str* why_not) {
    const char* why = "the problem does not match the operator's schema";
    try {
      why = Row::why_not(*problem, device);
    } catch (const std::exception&) {  // operands are read by accessors that throw
    }
    if (why != nullptr && why_not != nullptr) *why_not = str(why);
    return why == nullptr;
  }

  static double cost_ns(const rm_problem* problem, const rm_device_info* device, uint32_t) {
    try {
      return Row::cost_ns(*problem, device);
    } catch (const std::exception&) {
      return 1e18;
    }
  }

  static rm_status* prepare(const rm_problem* problem, const rm_device_info* device, uint32_t,
                            rm_kernel_state** out) {
    return guard(
        [&] { *out = reinterpret_cast<rm_kernel_state*>(Row::make(*problem, device)); });
  }

  static void release(rm_kernel_state* s) { delete reinterpret_cast<State*>(s); }

  static constexpr uint64_t packed_alignment() {
    if constexpr (requires { State::kPackedAlignment; }) {
      return State::kPackedAlignment;
    } else {
      return 64;
    }
  }

  static uint64_t workspace(const rm_kernel_state* s) { return state(s).workspace_bytes(); }

  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, packed_alignment(), 0, {}};
    if (!state(s).packs(input)) return;
    out->bytes = state(s).packed_bytes(input);
    out->layout = str(state(s).layout(input));
  }

  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* source,
                            void* packed) {
    return guard([&] {
      if (!state(s).packs(input)) {
        throw std::invalid_argument("[prepack] expected an operand that the kernel packs, got " +
                                    std::to_string(input));
      }
      state(s).prepack(input, *source, packed);
    });
  }

  static rm_status* launch(const rm_launch* l) {
    rm_status* status = nullptr;
    rm_status* thrown = guard([&] {
      if constexpr (std::is_void_v<decltype(state(l->state).launch(*l))>) {
        state(l->state).launch(*l);
      } else {
        status = state(l->state).launch(*l);
      }
    });
    return thrown != nullptr ? thrown : status;
  }
};

/// The row of `Row` for operator `op`. The texts must live as long as the plugin; `digest` changes
/// with the kernel's code.
template <class Row>
rm_kernel kernel_row(std::string_view op, std::string_view name, std::string_view digest,
                     uint32_t traits) {
  using Entries = RowEntries<Row>;
  using State = typename Row::State;
  rm_kernel row{};
  row.struct_size = sizeof(row);
  row.op = str(op);
  row.name = str(name);
  row.digest = str(digest);
  row.traits = traits;
  row.num_configs = 1;
  row.supports = Entries::supports;
  row.cost_ns = Entries::cost_ns;
  row.prepare = Entries::prepare;
  row.release = Entries::release;
  row.launch = Entries::launch;
  if constexpr (requires(const State& s) { s.workspace_bytes(); }) {
    row.workspace = Entries::workspace;
  }
  if constexpr (requires(const State& s) { s.packs(size_t{}); }) {
    row.packing = Entries::packing;
    row.prepack = Entries::prepack;
  }
  if constexpr (requires { Row::edges(); }) {
    const std::span<const rm_edge> edges = Row::edges();
    row.edges = edges.data();
    row.num_edges = edges.size();
  }
  return row;
}

}  // namespace rm::plugin
