// Turns an operator module's table into kernel rows of include/rm/kernels.h, one row a row.
//
// An operator is a class with
//   using Problem = ...;                              // the module's own
//   static constexpr const char* kOp;                 // of docs/operators.md
//   static std::span<const cuda_ops::KernelRow<Problem>> rows();
//   explicit Operator(const rm_problem&);             // throws NotForModule
//   std::vector<Placed> tensors;                      // operands that the module gets
//   Problem problem(const cuda_ops::Tensor* t) const; // over `tensors` with their addresses
//   static std::size_t workspace(const Problem&);     // bytes with which any row may run
//   static cuda_ops::Status run(const Problem&, const char* kernel, Workspace, Stream);
// and, where the table leaves it out,
//   static double least_us(const Problem&);           // that moving its memory takes
//   bool stable;                                      // the problem's stable_weights are constants
//   static constexpr rm_edge kEdges[];                // where its kernels' tiles end (rm_kernel.edges)
//   std::optional<Packed> packed() const;             // a constant that is wanted in another layout
//
// In a graph kernels overlap (decision 0029): the graph's launch stands between whatever wrote weights
// and every kernel in it. Launched one by one they do not.
// Operands whose strides the module does not take are copied into the workspace first, results out of
// it afterwards. An operator that keeps a part of its result says `static constexpr bool kUpdates`.
//
// Tables ask tensors for their alignment. When a kernel is chosen there are no addresses yet, so
// each operand stands at a made-up one on 2^40; where a real one lies worse than its kernel needs,
// the module's own choice among its rows serves.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/build_id.hpp"
#include "common/device_scope.hpp"
#include "common/stream.hpp"
#include "rm/plugin.hpp"
#include "rows/operands.hpp"

namespace rm::cuda {

inline constexpr size_t kMostTensors = 16;
inline constexpr size_t kMostRows = 24;

/// An operand as the module sees it, and which operand or result of the problem it is.
struct Placed {
  cuda_ops::Tensor tensor;
  size_t index = 0;
  bool result = false;
};

/// A constant operand and the dense layout, of the same elements, in which the module gets it.
struct Packed {
  size_t tensor = 0;          // in Op::tensors
  cuda_ops::Tensor layout;    // without gaps
  const char* name = nullptr;  // of the layout
};

void check_status(const cuda_ops::Status& status);
/// `from` in the layout of `to`, on a stream of its own, which has ended when this returns.
void copy_at_once(const cuda_ops::Tensor& from, const cuda_ops::Tensor& to);
/// Whether launches on the stream become a graph's.
bool is_recorded(cudaStream_t stream);

/// An operand that is copied before the module runs, or a result that is copied behind it.
struct Densed {
  size_t tensor = 0;       // in Op::tensors
  bool result = false;
  cuda_ops::Tensor given;  // as the problem has it
  size_t offset = 0;       // of the copy in the workspace
};

/// `t` without gaps, axes in order; axes of stride 0 stay so.
cuda_ops::Tensor dense(const cuda_ops::Tensor& t);
/// Elements that a dense tensor has in memory, as bytes on whole alignments of a workspace.
size_t dense_bytes(const cuda_ops::Tensor& t);
/// `t` are the tensors with their addresses, which become the copies'; operands are copied.
void launch_copies_in(const std::vector<Densed>& copies, cuda_ops::Tensor* t, char* workspace,
                      cudaStream_t stream);
/// Results are copied to `outputs`, the problem's.
void launch_copies_out(const std::vector<Densed>& copies, const cuda_ops::Tensor* t,
                       const std::vector<Placed>& tensors, void* const* outputs,
                       cudaStream_t stream);

/// Of operators that name none: blocks of threads and their vectors along the innermost axis.
inline constexpr rm_edge kBlockEdges[] = {{0, 0, 1024}};

template <class Op>
struct Row {
  using Problem = typename Op::Problem;
  using ModuleRow = cuda_ops::KernelRow<Problem>;

  struct State {
    Op op;  // its tensors as the module gets them
    std::vector<Densed> copies;
    std::optional<Packed> packed;
    const char* kernel = nullptr;
    int device = 0;
    std::size_t workspace = 0, copied = 0;  // bytes: the module's, the copies'
  };

  /// body(problem) over made-up addresses.
  template <class Body>
  static auto planned(const Op& op, Body&& body) {
    cuda_ops::Tensor t[kMostTensors];
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      t[i] = op.tensors[i].tensor;
      t[i].data = reinterpret_cast<void*>((i + 1) << 40);
    }
    return body(op.problem(t));
  }

  static constexpr bool keeps_results() {
    if constexpr (requires { Op::kUpdates; }) {
      return Op::kUpdates;
    } else {
      return false;
    }
  }

  /// Throws NotForModule; its text lives until the thread's next call.
  static State decoded(const rm_problem& p) {
    State state{Op(p), {}, {}};
    Op& op = state.op;
    if (op.tensors.size() > kMostTensors) throw NotForModule("too many operands");
    if constexpr (requires { op.packed(); }) {
      state.packed = op.packed();
      if (state.packed) op.tensors[state.packed->tensor].tensor = state.packed->layout;
    }
    const auto check = [&] { return planned(op, [](const Problem& q) { return legal(q); }); };
    cuda_ops::Status status = check();
    if (status) return state;
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      cuda_ops::Tensor& t = op.tensors[i].tensor;
      const cuda_ops::Tensor copy = dense(t);
      const bool result = op.tensors[i].result;
      if (same_strides(copy, t) || (result && keeps_results())) continue;
      state.copies.push_back({i, result, t, state.copied});
      state.copied += dense_bytes(t);
      t = copy;
    }
    if (!state.copies.empty()) status = check();
    if (status) return state;
    static thread_local std::string text;
    text = status.message;
    throw NotForModule(text.c_str());
  }

  template <size_t I>
  static int supports(const rm_problem* p, const rm_device_info* info, rm_str* out) {
    const char* why = "the CUDA runtime does not answer";
    try {
      const DeviceScope scope(info->dl_device_id);
      const State state = decoded(*p);
      why = planned(state.op, [](const Problem& q) { return Op::rows()[I].why_not(q); });
    } catch (const NotForModule& no) {
      why = no.what();
    } catch (const std::exception&) {
    }
    if (why != nullptr && out != nullptr) *out = plugin::str(why);
    return why == nullptr;
  }

  template <size_t I>
  static double cost_ns(const rm_problem* p, const rm_device_info* info, uint32_t) {
    try {
      const DeviceScope scope(info->dl_device_id);
      const State state = decoded(*p);
      constexpr double kCopyNs = 3000, kCopyBytesPerNs = 1000;  // launches and bytes, roughly
      const double copies = kCopyNs * static_cast<double>(state.copies.size()) +
                            static_cast<double>(state.copied) / kCopyBytesPerNs;
      return copies + planned(state.op, [](const Problem& problem) {
               double us = Op::rows()[I].cost_us(problem);
               if constexpr (requires { Op::least_us(problem); }) {
                 us = std::max(us, Op::least_us(problem));
               }
               return 1e3 * us;
             });
    } catch (const std::exception&) {
      return 1e18;
    }
  }

  template <size_t I>
  static rm_status* prepare(const rm_problem* p, const rm_device_info* info, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard([&] {
      const DeviceScope scope(info->dl_device_id);
      const RelaxedCapture relaxed;
      auto state = std::make_unique<State>(decoded(*p));
      state->kernel = Op::rows()[I].name;
      state->device = info->dl_device_id;
      state->workspace = planned(state->op, [](const Problem& q) { return Op::workspace(q); });
      *out = reinterpret_cast<rm_kernel_state*>(state.release());
    });
  }

  static void release(rm_kernel_state* s) { delete reinterpret_cast<State*>(s); }
  static uint64_t workspace(const rm_kernel_state* s) {
    const State& state = *reinterpret_cast<const State*>(s);
    return state.copied + state.workspace;
  }

  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, cuda_ops::kWorkspaceAlignment, 0, {}};
    const State& state = *reinterpret_cast<const State*>(s);
    if (!state.packed || state.op.tensors[state.packed->tensor].index != input) return;
    out->bytes = dense_bytes(state.packed->layout);
    out->layout = plugin::str(state.packed->name);
  }
  /// Runs once a weight, when what made it has ended; it has ended, too, when this returns.
  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* src, void* dst) {
    return plugin::guard([&] {
      const State& state = *reinterpret_cast<const State*>(s);
      if (!state.packed || state.op.tensors[state.packed->tensor].index != input) {
        throw plugin::Error(RM_INVALID_ARGUMENT, "[cuda] expected an operand that is packed");
      }
      const DeviceScope scope(state.device);
      cuda_ops::Tensor from = state.op.lifted(tensor_of(*src)), to = state.packed->layout;
      from.data = static_cast<char*>(src->data) + src->byte_offset, to.data = dst;
      copy_at_once(from, to);
    });
  }

  static rm_status* launch(const rm_launch* l) {
    return plugin::guard([&] {
      const State& state = *reinterpret_cast<const State*>(l->state);
      const DeviceScope scope(state.device);
      const RelaxedCapture relaxed;
      cuda_ops::Tensor t[kMostTensors];
      for (size_t i = 0; i < state.op.tensors.size(); ++i) {
        const Placed& placed = state.op.tensors[i];
        t[i] = placed.tensor;
        t[i].data = placed.result ? l->outputs[placed.index]
                                  : const_cast<void*>(l->inputs[placed.index]);
      }
      const cudaStream_t stream = stream_of(l->stream);
      auto* memory = static_cast<char*>(l->workspace);
      launch_copies_in(state.copies, t, memory, stream);
      Problem problem = state.op.problem(t);
      if constexpr (requires { problem.overlap; }) {
        problem.overlap = is_recorded(stream);
        if constexpr (requires { state.op.stable; }) problem.stable_weights = state.op.stable;
      }
      const cuda_ops::Workspace space{memory == nullptr ? nullptr : memory + state.copied,
                                      state.workspace};
      cuda_ops::Status status = Op::run(problem, state.kernel, space, stream);
      if (status.code == cuda_ops::Code::unsupported) status = Op::run(problem, "", space, stream);
      check_status(status);
      launch_copies_out(state.copies, t, state.op.tensors, l->outputs, stream);
    });
  }

  template <size_t I>
  static rm_kernel made() {
    rm_kernel row{};
    row.struct_size = sizeof row;
    row.op = plugin::str(Op::kOp);
    row.name = plugin::str(Op::rows()[I].name);
    row.digest = plugin::str(build_id());
    row.traits = RM_KERNEL_DETERMINISTIC | RM_KERNEL_CAPTURABLE;
    row.num_configs = 1;
    row.supports = supports<I>;
    row.cost_ns = cost_ns<I>;
    row.prepare = prepare<I>;
    row.release = release;
    row.workspace = workspace;
    row.launch = launch;
    if constexpr (requires(const Op& op) { op.packed(); }) row.packing = packing, row.prepack = prepack;
    if constexpr (requires { Op::kEdges; }) {
      row.edges = Op::kEdges, row.num_edges = std::size(Op::kEdges);
    } else {
      row.edges = kBlockEdges, row.num_edges = std::size(kBlockEdges);
    }
    return row;
  }

  static void add(std::vector<rm_kernel>& out) {
    static_assert(kMostRows >= 1);
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((I < Op::rows().size() ? out.push_back(made<I>()) : void()), ...);
    }(std::make_index_sequence<kMostRows>{});
  }
};

/// All rows of the plugin, in order of preference.
std::vector<rm_kernel> all_rows();

// One function a file of rows/.
void add_gemm_rows(std::vector<rm_kernel>& out);
void add_norm_rows(std::vector<rm_kernel>& out);
void add_attention_rows(std::vector<rm_kernel>& out);
void add_ewise_rows(std::vector<rm_kernel>& out);
void add_move_rows(std::vector<rm_kernel>& out);
void add_reduce_rows(std::vector<rm_kernel>& out);
void add_image_rows(std::vector<rm_kernel>& out);

}  // namespace rm::cuda
