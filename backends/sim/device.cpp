// The device: what it supports, its compiler, its loader. Programs run by the host's own compiler
// (rm/host_executor.h), so the numbers are those of the CPU kernels.
#include "device.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <set>
#include <thread>

#include "artefact.hpp"
#include "program_text.hpp"
#include "rm/host_executor.h"

namespace rm::sim {
namespace {

using plugin::Error;
using plugin::str;
using plugin::view;

const std::set<std::string, std::less<>> kOperators = {
    "reshape",   "permute",   "expand", "slice",       "concat",     "iota",     "full",
    "cast",      "where",     "neg",    "abs",         "exp",        "log",      "sqrt",
    "rsqrt",     "sin",       "cos",    "tanh",        "erf",        "sigmoid",  "relu",
    "gelu",      "gelu_tanh", "silu",   "logical_not", "reciprocal", "add",      "sub",
    "mul",       "div",       "pow",    "minimum",     "maximum",    "eq",       "ne",
    "lt",        "le",        "gt",     "ge",          "and",        "or",       "reduce",
    "softmax",   "embedding", "matmul", "linear",      "layer_norm", "rms_norm", "sdpa",
    "index_copy"};
constexpr std::string_view kStages[] = {"parsing", "lowering", "scheduling", "allocating",
                                        "encoding"};

[[noreturn]] void crash() {
  std::fprintf(stderr, "sim: simulated crash\n");
  std::signal(SIGSEGV, SIG_DFL);
  std::raise(SIGSEGV);
  std::abort();
}

std::string_view code_of(const rm_program& program) {
  if (view(program.format) != "rm.ir/1") {
    throw Error(RM_INVALID_ARGUMENT, "[sim] expected a program in rm.ir/1, got '" +
                                         std::string(view(program.format)) + "'");
  }
  return {static_cast<const char*>(program.code.data), program.code.size};
}

const rm_constant& row(const rm_constants& constants, size_t i) {
  const auto* bytes = reinterpret_cast<const std::byte*>(constants.data);
  return *reinterpret_cast<const rm_constant*>(bytes + i * constants.stride);
}

uint64_t memory_needed(const Program& program) {
  // Nothing is reused: a simulated device has a simulated allocator.
  uint64_t bytes = 0;
  for (const Type& type : program.inputs) bytes += type.bytes();
  for (const Type& type : program.weights) bytes += type.bytes();
  uint64_t largest = 0;
  for (const Node& node : program.nodes) {
    for (const Type& type : node.results) largest = std::max(largest, type.bytes());
  }
  return bytes + 3 * largest;
}

/// Takes the time a compiler takes, reporting and listening while it does.
void pretend_to_work(double seconds, const rm_compile_options& options) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto total = std::chrono::duration<double>(seconds);
  int last = -1;
  while (true) {
    if (options.cancelled && options.cancelled(options.cancelled_ctx)) {
      throw Error(RM_CANCELLED, "[sim] expected to finish, got cancelled");
    }
    const double done = seconds <= 0 ? 1 : std::min(1.0, (Clock::now() - start) / total);
    const auto stage =
        std::min<size_t>(static_cast<size_t>(done * std::size(kStages)), std::size(kStages) - 1);
    if (const int percent = static_cast<int>(done * 20); options.progress && percent != last) {
      options.progress(options.progress_ctx, done, str(kStages[stage]));
      last = percent;
    }
    if (done >= 1) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void check_device() {
  if (fault("device_lost")) throw Error(RM_UNAVAILABLE, "[sim] expected the device, got nothing");
}

/// Copies elements one by one, or a row at once where both lie together: any strides.
void copy_strided(const rm_tensor& src, const rm_tensor& dst, int axis, const char* from,
                  char* to) {
  const auto bytes = (int64_t{src.dtype.bits} + 7) / 8;
  if (axis == src.ndim) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const int64_t count = src.shape[axis], by = src.strides[axis], at = dst.strides[axis];
  if (axis == src.ndim - 1 && by == 1 && at == 1) {
    std::memcpy(to, from, static_cast<size_t>(count * bytes));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    copy_strided(src, dst, axis + 1, from + i * by * bytes, to + i * at * bytes);
  }
}

struct SimStream final : plugin::Stream {
  void copy(const rm_tensor& src, rm_tensor& dst) override {
    check_device();
    if (src.ndim != dst.ndim || !std::equal(src.shape, src.shape + src.ndim, dst.shape)) {
      throw Error(RM_INVALID_ARGUMENT, "[sim] expected two tensors of one shape, got others");
    }
    copy_strided(src, dst, 0, static_cast<const char*>(src.data) + src.byte_offset,
                 static_cast<char*>(dst.data) + dst.byte_offset);
  }
};

/// A buffer of a device that has so much memory and no more.
class SimBuffer final : public plugin::Buffer {
 public:
  SimBuffer(uint64_t memory_bytes, size_t bytes, size_t align)
      : memory_(bytes, align), bytes_(bytes) {
    if ((used += bytes) <= memory_bytes) return;
    used -= bytes;
    throw Error(RM_RESOURCE_EXHAUSTED, "[sim] expected at most " + std::to_string(memory_bytes) +
                                           " bytes of device memory, got buffers of more");
  }
  ~SimBuffer() override { used -= bytes_; }
  void* ptr() override { return memory_.ptr(); }

 private:
  static inline std::atomic<uint64_t> used = 0;
  plugin::HostBuffer memory_;
  const size_t bytes_;
};

uint64_t bytes_of(const rm_tensor& tensor) {
  uint64_t bytes = (uint64_t{tensor.dtype.bits} + 7) / 8;
  for (int d = 0; d < tensor.ndim; ++d) bytes *= static_cast<uint64_t>(tensor.shape[d]);
  return bytes;
}

}  // namespace

struct SimWeight {
  SimWeight(const rm_tensor& from, uint64_t memory_bytes)
      : memory(memory_bytes, bytes_of(from), 64),
        shape(from.shape, from.shape + from.ndim),
        tensor(from) {
    std::memcpy(memory.ptr(), static_cast<const char*>(from.data) + from.byte_offset,
                bytes_of(from));
    tensor.data = memory.ptr();
    tensor.byte_offset = 0;
    tensor.shape = shape.data();
    tensor.strides = nullptr;
  }
  SimBuffer memory;
  std::vector<int64_t> shape;
  rm_tensor tensor;
};

namespace {

class SimExecutable final : public plugin::Executable {
 public:
  SimExecutable(std::string artefact, rm_constants constants) : artefact_(std::move(artefact)) {
    for (size_t i = 0; i < constants.size; ++i) external_.push_back(row(constants, i));
  }
  ~SimExecutable() override {
    if (program_ != nullptr) host_->destroy(program_);
  }

  rm_blob serialize() const override {
    std::string bytes = artefact_;
    if (fault("corrupt_artefact")) bytes[bytes.size() / 2] ^= 0x10;
    return plugin::make_blob(std::move(bytes));
  }

  void info(rm_executable_info& out) const override {
    const Program program = parse(decode(artefact_).program);
    out.struct_size = sizeof out;
    out.num_inputs = program.inputs.size();
    out.device_bytes = memory_needed(program);
  }

  /// Loads it: what a real device would do in deserialize(). The device has `memory_bytes`.
  void load(plugin::SharedConstants<SimWeight>& weights, uint64_t memory_bytes) {
    parts_ = decode(artefact_);
    types_ = parse(parts_.program);
    host_ =
        static_cast<const rm_host_executor*>(plugin::host_extension(RM_HOST_EXECUTOR_EXTENSION));
    if (host_ == nullptr) return;  // a host that only looks at artefacts
    std::vector<rm_constant> constants = external_;
    std::vector<rm_tensor> tensors(parts_.embedded.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      for (rm_constant& constant : constants) {
        if (view(constant.name) != parts_.embedded[i].first) continue;
        tensors[i] = *constant.tensor;  // its type; the content is the artefact's own
        tensors[i].data = parts_.embedded[i].second.data();
        tensors[i].byte_offset = 0;
        constant.tensor = &tensors[i];
      }
    }
    for (rm_constant& constant : constants) {
      const bool is_embedded = std::any_of(tensors.begin(), tensors.end(), [&](const auto& one) {
        return constant.tensor == &one;
      });
      if (is_embedded) continue;
      weights_.push_back(weights.of(constant, [&](const rm_constant& given) {
        return std::make_shared<SimWeight>(*given.tensor, memory_bytes);
      }));
      constant.tensor = &weights_.back()->tensor;
    }
    const rm_program program{
        sizeof(rm_program), str("rm.ir/1"), {parts_.program.data(), parts_.program.size()}};
    const rm_option unfused{str("optimization_level"), str("0")};
    const rm_options how{&unfused, parts_.rounds ? size_t{1} : size_t{0}};
    check(host_->prepare(&program, {constants.data(), constants.size(), sizeof(rm_constant)}, how,
                         &program_));
  }

  void execute(const rm_execute_args& args) const override {
    if (fault("run_crash")) crash();
    if (fault("run_hang")) std::this_thread::sleep_for(std::chrono::hours(24));
    if (fault("run_error")) throw Error(RM_INTERNAL, "[sim] expected a result, got a device error");
    check_device();
    if (program_ == nullptr) {
      throw Error(RM_UNAVAILABLE, "[sim] expected a host with rm.host_executor/1, got one without");
    }
    run_with_states(args);
    if (!fault("wrong_numbers")) return;
    for (size_t o = 0; o < args.num_outputs; ++o) {
      const rm_tensor& output = *args.outputs[o];
      if (output.dtype.code != kDLFloat || output.dtype.bits != 32) continue;
      int64_t count = 1;
      for (int i = 0; i < output.ndim; ++i) count *= output.shape[i];
      auto* values = static_cast<float*>(output.data);
      for (int64_t i = 0; i < count; ++i) values[i] *= 1.05f;
    }
  }

 private:
  /// Donated inputs are the states, in their order; the last outputs are their new values.
  void run_with_states(const rm_execute_args& args) const {
    std::vector<rm_tensor> states(args.num_states);
    std::vector<const rm_tensor*> inputs;
    std::vector<rm_tensor*> outputs(args.outputs, args.outputs + args.num_outputs);
    size_t given = 0, state = 0;
    for (size_t i = 0; i < types_.inputs.size(); ++i) {
      if (!types_.donated[i]) {
        if (given == args.num_inputs)
          throw Error(RM_INVALID_ARGUMENT, "[sim] expected more inputs");
        inputs.push_back(args.inputs[given++]);
        continue;
      }
      if (state == args.num_states) throw Error(RM_INVALID_ARGUMENT, "[sim] expected more states");
      const Type& type = types_.inputs[i];
      rm_tensor& tensor = states[state];
      tensor.data = plugin::buffer_of(args.states[state++].buffer).ptr();
      tensor.device = {kDLCPU, 0};
      tensor.ndim = static_cast<int32_t>(type.dims.size());
      tensor.dtype = type.dl_dtype();
      tensor.shape = const_cast<int64_t*>(type.dims.data());
      inputs.push_back(&tensor);
      outputs.push_back(&tensor);
    }
    check(host_->run(program_, inputs.data(), inputs.size(), outputs.data(), outputs.size()));
  }

  /// A status of the host's own service, as this plugin's exception.
  static void check(rm_status* status) {
    if (status == nullptr) return;
    const rm_host_api* api = plugin::host();
    const Error error(api->status_code(status), std::string(view(api->status_message(status))));
    api->status_release(status);
    throw error;
  }

  const std::string artefact_;
  std::vector<rm_constant> external_;
  std::vector<std::shared_ptr<SimWeight>> weights_;  // what the program reads of them
  Artefact parts_;
  Program types_;
  const rm_host_executor* host_ = nullptr;
  rm_host_program* program_ = nullptr;
};

}  // namespace

SimDevice::SimDevice(size_t index)
    : settings_(settings()),
      index_(index),
      name_("Simulated NPU " + settings_.target),
      target_(settings_.target) {
  properties_ = {{str("static_shapes"), str("1")},
                 {str("worker"), str("1")},
                 {str("states"), str("1")},
                 {str("numerics"), str(settings_.bf16 ? "bf16" : "fp32")},
                 {str("embeds_weights"), str(settings_.embed ? "1" : "0")}};
}

rm_device_info SimDevice::info() const {
  rm_device_info out{};
  out.struct_size = sizeof out;
  out.caps = RM_CAP_SERIALIZE | RM_CAP_HOST_POINTERS;
  out.dl_device_type = kDLExtDev;
  out.dl_device_id = static_cast<int32_t>(index_);
  out.memory_bytes = settings_.memory_bytes;
  out.alignment = 64;
  out.name = str(name_);
  out.arch = str(target_);
  out.properties = {properties_.data(), properties_.size()};
  return out;
}

std::string SimDevice::fingerprint() const {
  // Skew: the worker finds another compiler than the one the program was looked up for.
  const bool skewed = std::getenv("RM_WORKER") != nullptr && fault("version_skew");
  return "sim;compiler=" + (skewed ? "0.9" : settings_.compiler) + ";target=" + target_ +
         ";numerics=" + (settings_.bf16 ? "bf16" : "fp32");
}

std::string_view SimDevice::why_not(const std::string& op, const std::vector<Type>& results) const {
  const auto& more = settings_.unsupported;
  if (!kOperators.contains(op) || std::find(more.begin(), more.end(), op) != more.end()) {
    return "the device has no such operator";
  }
  for (const Type& type : results) {
    if (!type.is_static) return "the device needs static shapes";
    if (type.dtype == "f64") return "the device has no f64";
    if (type.dims.size() > 6) return "the device has tensors of rank 6 at most";
  }
  return {};
}

void SimDevice::query_support(const rm_program& program, rm_node_support* out, size_t n) {
  const Program parsed = parse(code_of(program));
  if (parsed.nodes.size() != n) {
    throw Error(RM_INVALID_ARGUMENT, "[sim] expected a row for each of " +
                                         std::to_string(parsed.nodes.size()) + " nodes, got " +
                                         std::to_string(n));
  }
  const size_t stride = n > 0 ? out->struct_size : 0;
  for (size_t i = 0; i < n; ++i) {
    auto* verdict =
        reinterpret_cast<rm_node_support*>(reinterpret_cast<std::byte*>(out) + i * stride);
    const std::string_view why = why_not(parsed.nodes[i].op, parsed.nodes[i].results);
    verdict->verdict = why.empty() ? RM_NODE_YES : RM_NODE_NO;
    verdict->reason = str(why);
  }
}

std::unique_ptr<plugin::Executable> SimDevice::compile(const rm_program& program,
                                                       const rm_compile_options& options) {
  const std::string_view code = code_of(program);
  const Program parsed = parse(code);
  for (const Node& node : parsed.nodes) {
    if (const auto why = why_not(node.op, node.results); !why.empty()) {
      throw Error(RM_UNIMPLEMENTED,
                  "[sim] expected supported operators, got " + node.op + ": " + std::string(why));
    }
  }
  const uint64_t needed = memory_needed(parsed);
  if (needed > settings_.memory_bytes || fault("out_of_memory")) {
    throw Error(RM_RESOURCE_EXHAUSTED,
                "[sim] expected at most " + std::to_string(settings_.memory_bytes) +
                    " bytes of device memory, got a program that needs " + std::to_string(needed));
  }
  if (fault("compile_error")) throw Error(RM_INTERNAL, "[sim] internal compiler error: E1042");
  if (fault("compile_crash")) crash();
  if (fault("compile_hang")) std::this_thread::sleep_for(std::chrono::hours(24));
  pretend_to_work(settings_.compile_seconds, options);
  Artefact artefact{settings_.target, settings_.compiler, settings_.bf16, std::string(code), {}};
  if (settings_.bf16) artefact.program = round_to_bf16(code);
  for (size_t i = 0; settings_.embed && i < options.constants.size; ++i) {
    const rm_constant& constant = row(options.constants, i);
    if (constant.tensor == nullptr || constant.tensor->data == nullptr) continue;
    artefact.embedded.emplace_back(
        std::string(view(constant.name)),
        std::string(static_cast<const char*>(constant.tensor->data), bytes_of(*constant.tensor)));
  }
  return std::make_unique<SimExecutable>(encode(artefact), options.constants);
}

rm_compat SimDevice::check_compat(rm_bytes artefact) {
  const std::string_view bytes(static_cast<const char*>(artefact.data), artefact.size);
  return fits(bytes, settings_.target, settings_.compiler) ? RM_COMPAT_OPTIMAL : RM_COMPAT_NO;
}

std::unique_ptr<plugin::Executable> SimDevice::deserialize(rm_bytes artefact,
                                                           rm_constants constants) {
  auto executable = std::make_unique<SimExecutable>(
      std::string(static_cast<const char*>(artefact.data), artefact.size), constants);
  executable->load(weights_, settings_.memory_bytes);
  return executable;
}

std::unique_ptr<plugin::Buffer> SimDevice::alloc(uint32_t, size_t bytes, size_t align) {
  return std::make_unique<SimBuffer>(settings_.memory_bytes, bytes, align);
}

std::unique_ptr<plugin::Stream> SimDevice::stream_create(uint32_t) {
  return std::make_unique<SimStream>();
}

}  // namespace rm::sim
