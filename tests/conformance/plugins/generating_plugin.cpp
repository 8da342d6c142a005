// The made-up maker of docs/plugin_guide.md once more, in C++: compiles programs (the host runs them),
// keeps states in buffers of its own, and generates GPT-2 by a runtime of its own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpt2_runtime.hpp"
#include "rm/generate.hpp"
#include "rm/host_executor.h"
#include "rm/plugin.hpp"

namespace plugin = rm::plugin;

namespace {

constexpr std::string_view kMagic = "ZETA/2\n";

std::string text_of(rm_bytes b) { return {static_cast<const char*>(b.data), b.size}; }

/// A donated input: where among the inputs it is, and its shape. All are f32.
struct Donated {
  size_t place = 0;
  std::vector<int64_t> dims;
};

/// Lines of the form: input %4 "x" : f32[1,2,64,8] donated
std::vector<Donated> donated_of(const std::string& text, size_t& inputs) {
  std::vector<Donated> out;
  inputs = 0;
  for (size_t at = text.find("\ninput "); at != std::string::npos;
       at = text.find("\ninput ", at + 1)) {
    const std::string line = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
    if (line.ends_with(" donated")) {
      Donated one{inputs, {}};
      if (line.find(": f32[") == std::string::npos) {
        throw plugin::Error(RM_UNIMPLEMENTED, "[zeta] expected states in f32, got " + line);
      }
      for (size_t dim = line.rfind('['); line[dim] != ']';) {
        size_t used = 0;
        one.dims.push_back(std::stoll(line.substr(dim + 1), &used));
        dim += used + 1;
      }
      out.push_back(std::move(one));
    }
    ++inputs;
  }
  return out;
}

struct ZetaExecutable final : plugin::Executable {
  ZetaExecutable(std::string text, rm_constants constants)
      : code(std::move(text)), donated(donated_of(code, inputs)) {
    host = static_cast<const rm_host_executor*>(plugin::host_extension(RM_HOST_EXECUTOR_EXTENSION));
    if (host == nullptr || code.empty()) return;  // a host that only looks at artefacts
    const rm_program raw{sizeof(rm_program), plugin::str("rm.ir/1"), {code.data(), code.size()}};
    check(host->prepare(&raw, constants, {nullptr, 0}, &program));
  }
  ~ZetaExecutable() override {
    if (program != nullptr) host->destroy(program);
  }
  rm_blob serialize() const override { return plugin::make_blob(std::string(kMagic) + code); }

  void execute(const rm_execute_args& args) const override {
    if (program == nullptr) throw plugin::Error(RM_UNAVAILABLE, "[zeta] expected a host executor");
    std::vector<rm_tensor> states(donated.size());
    std::vector<const rm_tensor*> given(args.inputs, args.inputs + args.num_inputs);
    std::vector<rm_tensor*> results(args.outputs, args.outputs + args.num_outputs);
    for (size_t i = 0; i < donated.size(); ++i) {
      states[i].data = plugin::buffer_of(args.states[i].buffer).ptr();
      states[i].device = {kDLCPU, 0};
      states[i].ndim = static_cast<int32_t>(donated[i].dims.size());
      states[i].dtype = {kDLFloat, 32, 1};
      states[i].shape = const_cast<int64_t*>(donated[i].dims.data());
      given.insert(given.begin() + static_cast<ptrdiff_t>(donated[i].place), &states[i]);
      results.push_back(&states[i]);
    }
    check(host->run(program, given.data(), given.size(), results.data(), results.size()));
  }

  static void check(rm_status* status) {
    if (status == nullptr) return;
    const rm_host_api* api = plugin::host();
    const plugin::Error error(api->status_code(status),
                              std::string(plugin::view(api->status_message(status))));
    api->status_release(status);
    throw error;
  }

  const std::string code;
  size_t inputs = 0;
  const std::vector<Donated> donated;
  const rm_host_executor* host = nullptr;
  rm_host_program* program = nullptr;
};

struct ZetaStream final : plugin::Stream {
  void copy(const rm_tensor& src, rm_tensor& dst) override { copy(src, dst, 0, 0, 0); }

  static void copy(const rm_tensor& src, rm_tensor& dst, int axis, int64_t from, int64_t to) {
    const int64_t bytes = src.dtype.bits / 8;
    if (axis == src.ndim) {
      std::memcpy(static_cast<char*>(dst.data) + dst.byte_offset + to * bytes,
                  static_cast<const char*>(src.data) + src.byte_offset + from * bytes,
                  static_cast<size_t>(bytes));
      return;
    }
    for (int64_t i = 0; i < src.shape[axis]; ++i) {
      copy(src, dst, axis + 1, from + i * src.strides[axis], to + i * dst.strides[axis]);
    }
  }
};

struct ZetaDevice final : plugin::Device {
  rm_device_info info() const override {
    static const rm_option properties[] = {
        {plugin::str("static_shapes"), plugin::str("1")},
        {plugin::str("worker"), plugin::str("1")},
        {plugin::str("states"), plugin::str("1")},
        {plugin::str("generates"), plugin::str("1")},
        {plugin::str("samples"), plugin::str("temperature top_k")}};
    rm_device_info out{};
    out.struct_size = sizeof out;
    out.caps = RM_CAP_SERIALIZE;
    out.dl_device_type = kDLExtDev;
    out.memory_bytes = uint64_t{1} << 30;
    out.alignment = 64;
    out.name = plugin::str("Zeta Two");
    out.arch = plugin::str("zeta-2");
    out.properties = {properties, std::size(properties)};
    return out;
  }
  std::string fingerprint() const override { return "zeta compiler 2"; }
  void query_support(const rm_program&, rm_node_support* out, size_t n) override {
    const size_t stride = n > 0 ? out->struct_size : 0;
    for (size_t i = 0; i < n; ++i) {
      reinterpret_cast<rm_node_support*>(reinterpret_cast<char*>(out) + i * stride)->verdict =
          RM_NODE_YES;
    }
  }
  std::unique_ptr<plugin::Executable> compile(const rm_program& program,
                                              const rm_compile_options& options) override {
    for (int step = 0; step <= 20; ++step) {
      if (options.cancelled != nullptr && options.cancelled(options.cancelled_ctx) != 0) {
        throw plugin::Error(RM_CANCELLED, "[zeta] cancelled");
      }
      if (options.progress != nullptr) {
        options.progress(options.progress_ctx, step / 20.0, plugin::str("wrapping"));
      }
    }
    return std::make_unique<ZetaExecutable>(text_of(program.code), options.constants);
  }
  rm_compat check_compat(rm_bytes artefact) override {
    return text_of(artefact).starts_with(kMagic) ? RM_COMPAT_OPTIMAL : RM_COMPAT_NO;
  }
  std::unique_ptr<plugin::Executable> deserialize(rm_bytes artefact,
                                                  rm_constants constants) override {
    if (check_compat(artefact) == RM_COMPAT_NO) {
      throw plugin::Error(RM_DATA_LOSS, "[zeta] expected an artefact of this compiler");
    }
    return std::make_unique<ZetaExecutable>(text_of(artefact).substr(kMagic.size()), constants);
  }
  std::unique_ptr<plugin::Stream> stream_create(uint32_t) override {
    return std::make_unique<ZetaStream>();
  }
};

struct ZetaGeneration final : plugin::Generation {
  ZetaGeneration(const gpt2::Model& model, const rm_generate_request& given) : request(given) {
    for (size_t i = 0; i < request.num_prompts; ++i) {
      rows.emplace_back(model);
      for (size_t t = 0; t < request.prompts[i].count; ++t) {
        const int64_t token = request.prompts[i].tokens[t];
        if (t + 1 < request.prompts[i].count) rows[i].feed(token);
        if (t + 1 == request.prompts[i].count) last.push_back(token);
      }
      draws.emplace_back(request.seeds == nullptr ? 0 : request.seeds[i]);
    }
  }
  void step(int64_t* tokens, double* log_probabilities) override {
    for (size_t i = 0; i < rows.size(); ++i) {
      gpt2::Floats logits = rows[i].feed(last[i]);
      last[i] = tokens[i] = request.sampling.size == 0
                                ? std::max_element(logits.begin(), logits.end()) - logits.begin()
                                : drawn(logits, draws[i]);
#ifdef GENERATING_WRONG  // a runtime with a bug: the conformance suite must find it
      last[i] = tokens[i] = (tokens[i] + 1) % static_cast<int64_t>(logits.size());
#endif
      if (log_probabilities == nullptr || request.sampling.size != 0) continue;
      double sum = 0;
      for (const float v : logits) sum += std::exp(static_cast<double>(v));
      log_probabilities[i] = static_cast<double>(logits[static_cast<size_t>(tokens[i])]) -
                             std::log(sum);
    }
  }
  int64_t drawn(const gpt2::Floats& logits, std::mt19937_64& draw) const {
    double temperature = 1;
    size_t kept = logits.size();
    for (size_t i = 0; i < request.sampling.size; ++i) {
      const rm_option& field = request.sampling.data[i];
      const double value = std::stod(std::string(plugin::view(field.value)));
      if (plugin::view(field.key) == "temperature") temperature = value;
      if (plugin::view(field.key) == "top_k") kept = std::min(kept, static_cast<size_t>(value));
    }
    gpt2::Floats ordered = logits;
    std::sort(ordered.begin(), ordered.end(), std::greater<>());
    std::vector<double> weights;
    for (const float v : logits) {
      weights.push_back(v < ordered[kept - 1] ? 0.0 : std::exp((v - ordered[0]) / temperature));
    }
    return std::discrete_distribution<int64_t>(weights.begin(), weights.end())(draw);
  }

  const rm_generate_request& request;  // stays until this is destroyed
  std::vector<gpt2::Row> rows;
  std::vector<int64_t> last;
  std::vector<std::mt19937_64> draws;
};

struct ZetaGenerator final : plugin::Generator {
  ZetaGenerator(size_t /*device*/, std::string_view folder, rm_options /*options*/)
      : model(checked(std::string(folder))) {}
  static std::string checked(std::string folder) {
    if (gpt2::Model::is_one(folder)) return folder;
    throw plugin::Error(RM_UNIMPLEMENTED, "[zeta] expected a GPT-2, got another architecture");
  }
  uint64_t max_tokens() const override { return model.longest; }
  std::unique_ptr<plugin::Generation> start(const rm_generate_request& request) override {
    return std::make_unique<ZetaGeneration>(model, request);
  }
  const gpt2::Model model;
};

struct ZetaBackend final : plugin::Backend {
  std::string_view name() const override { return "zeta2"; }
  std::string_view version() const override { return "2.0"; }
  std::string_view build_id() const override { return ""; }
  int probe_score() noexcept override { return 1; }
  size_t device_count() override { return 1; }
  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index != 0) throw plugin::Error(RM_NOT_FOUND, "[zeta] expected device 0");
    return std::make_unique<ZetaDevice>();
  }
  const void* extension(std::string_view name) noexcept override {
    return name == RM_GENERATE_EXTENSION ? plugin::generators<ZetaGenerator>() : nullptr;
  }
};

}  // namespace

RM_EXPORT_BACKEND(ZetaBackend)
