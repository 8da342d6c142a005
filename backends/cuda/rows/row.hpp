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
// One with more than kMostTensors operands and results says `static constexpr size_t kTensors`.
//
// Tables ask tensors for their alignment. When a kernel is chosen there are no addresses yet, so
// each operand stands at a made-up one on 2^40; where a real one lies worse than its kernel needs,
// the module's own choice among its rows serves.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/build_id.hpp"
#include "common/device_scope.hpp"
#include "common/stream.hpp"
#include "rm/kernel_row.hpp"
#include "rows/operands.hpp"

namespace rm::cuda_ops {
class GemmLibrary;
}

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
  size_t tensor = 0;           // in Op::tensors
  cuda_ops::Tensor layout;     // without gaps
  const char* name = nullptr;  // of the layout
};

/// `from` in the layout of `to`, on a stream of its own, which has ended when this returns.
void copy_at_once(const cuda_ops::Tensor& from, const cuda_ops::Tensor& to);
void check_status(const cuda_ops::Status& status);
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
  static constexpr bool kPacks = requires(const Op& op) { op.packed(); };
  static constexpr size_t kMost = [] {
    if constexpr (requires { Op::kTensors; }) {
      return size_t{Op::kTensors};
    } else {
      return kMostTensors;
    }
  }();

  struct State {
    Op op;  // its tensors as the module gets them
    std::vector<Densed> copies;
    std::optional<Packed> packed;
    const char* kernel = nullptr;
    int device = 0;
    std::size_t workspace = 0, copied = 0;  // bytes: the module's, the copies'

    static constexpr uint64_t kPackedAlignment = cuda_ops::kWorkspaceAlignment;

    uint64_t workspace_bytes() const { return copied + workspace; }
    void launch(const rm_launch& l) const;
    bool packs(size_t operand) const
      requires kPacks
    {
      return packed && op.tensors[packed->tensor].index == operand;
    }
    uint64_t packed_bytes(size_t) const { return dense_bytes(packed->layout); }
    const char* layout(size_t) const { return packed->name; }
    /// Runs once a weight, when what made it has ended; it has ended, too, when this returns.
    void prepack(size_t operand, const rm_tensor& source, void* to) const;
  };

  /// body(problem) over made-up addresses.
  template <class Body>
  static auto planned(const Op& op, Body&& body) {
    cuda_ops::Tensor t[kMost];
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
    if (op.tensors.size() > kMost) throw NotForModule("too many operands");
    if constexpr (kPacks) {
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

  /// Row I of the module's table.
  template <size_t I>
  struct Indexed {
    using State = typename Row::State;

    static const char* why_not(const rm_problem& p, const rm_device_info* info) {
      try {
        const DeviceScope scope(info->dl_device_id);
        const State state = decoded(p);
        return planned(state.op, [](const Problem& q) { return Op::rows()[I].why_not(q); });
      } catch (const NotForModule& no) {
        return no.what();
      } catch (const std::exception&) {
        return "the CUDA runtime does not answer";
      }
    }

    static double cost_ns(const rm_problem& p, const rm_device_info* info) {
      const DeviceScope scope(info->dl_device_id);
      const State state = decoded(p);
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
    }

    static State* make(const rm_problem& p, const rm_device_info* info) {
      const DeviceScope scope(info->dl_device_id);
      const RelaxedCapture relaxed;
      auto state = std::make_unique<State>(decoded(p));
      state->kernel = Op::rows()[I].name;
      state->device = info->dl_device_id;
      state->workspace = planned(state->op, [](const Problem& q) { return Op::workspace(q); });
      return state.release();
    }

    static std::span<const rm_edge> edges() {
      if constexpr (requires { Op::kEdges; }) {
        return Op::kEdges;
      } else {
        return kBlockEdges;
      }
    }
  };

  template <size_t I>
  static rm_kernel made() {
    return plugin::kernel_row<Indexed<I>>(Op::kOp, Op::rows()[I].name, build_id(),
                                          RM_KERNEL_DETERMINISTIC | RM_KERNEL_CAPTURABLE);
  }

  static void add(std::vector<rm_kernel>& out) {
    static_assert(kMostRows >= 1);
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((I < Op::rows().size() ? out.push_back(made<I>()) : void()), ...);
    }(std::make_index_sequence<kMostRows>{});
  }
};

template <class Op>
void Row<Op>::State::launch(const rm_launch& l) const {
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  cuda_ops::Tensor t[kMost];
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const Placed& placed = op.tensors[i];
    t[i] = placed.tensor;
    t[i].data = placed.result ? l.outputs[placed.index]
                              : const_cast<void*>(l.inputs[placed.index]);
  }
  const cudaStream_t stream = stream_of(l.stream);
  auto* memory = static_cast<char*>(l.workspace);
  launch_copies_in(copies, t, memory, stream);
  Problem problem = op.problem(t);
  if constexpr (requires { problem.overlap; }) {
    problem.overlap = is_recorded(stream);
    // A weight that is copied first is written by a launch of this graph.
    if constexpr (requires { op.stable; }) problem.stable_weights = op.stable && copies.empty();
  }
  const cuda_ops::Workspace space{memory == nullptr ? nullptr : memory + copied,
                                  workspace};
  cuda_ops::Status status = Op::run(problem, kernel, space, stream);
  if (status.code == cuda_ops::Code::unsupported) status = Op::run(problem, "", space, stream);
  check_status(status);
  launch_copies_out(copies, t, op.tensors, l.outputs, stream);
}

template <class Op>
void Row<Op>::State::prepack(size_t, const rm_tensor& source, void* to) const {
  const DeviceScope scope(device);
  cuda_ops::Tensor from = op.lifted(tensor_of(source)), target = packed->layout;
  from.data = const_cast<void*>(plugin::address(source)), target.data = to;
  copy_at_once(from, target);
}

/// cuBLASLt, looked for once a process; one object serves every device.
cuda_ops::GemmLibrary& gemm_library();

/// All rows of the plugin, in order of preference.
std::vector<rm_kernel> all_rows();

// One function a file of rows/.
void add_linears_rows(std::vector<rm_kernel>& out);
void add_gemm_rows(std::vector<rm_kernel>& out);
void add_small_rows(std::vector<rm_kernel>& out);
void add_norm_rows(std::vector<rm_kernel>& out);
void add_attention_rows(std::vector<rm_kernel>& out);
void add_ewise_rows(std::vector<rm_kernel>& out);
void add_move_rows(std::vector<rm_kernel>& out);
void add_image_rows(std::vector<rm_kernel>& out);
void add_reduce_rows(std::vector<rm_kernel>& out);
void add_quant_rows(std::vector<rm_kernel>& out);
void add_update_rows(std::vector<rm_kernel>& out);
void add_loss_rows(std::vector<rm_kernel>& out);
void add_expert_rows(std::vector<rm_kernel>& out);

}  // namespace rm::cuda
