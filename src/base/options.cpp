// The rows, and how a value is found among argument, environment, file and default.
#include "base/options.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "base/edit_distance.hpp"
#include "base/error.hpp"

namespace rm {
namespace {

using enum OptionType;
using enum OptionGroup;

// clang-format off
constexpr OptionSpec kTable[] = {
    // name, env, group, type, default, accepted, affects_artefact, help, unbuilt
    //
    // Where and how to run. The device is in the key as target and backend identity, not by name.
    {"device", "RM_DEVICE", kSession, kDevice, "auto", "auto, cpu, gpu[:N], cuda[:N], npu[:N], rbln[:N], furiosa[:N], sim[:N], or a plugin's name[:N]", false,
     "the device that runs the models; auto is the usable device whose plugin reports the highest score, but never an NVIDIA GPU, which must be named, as in gpu:0"},
    {"inference_engine", "RM_ENGINE", kSession, kChoice, "auto", "auto|native|torch|vllm|onnxruntime", false,
     "what runs the models: native is rm_abstract's own compiler; torch leaves every model to PyTorch; vllm runs generate in vLLM, in a process of its own, and everything else as native does; onnxruntime runs models in ONNX Runtime on the CPU; auto is native"},
    {"engine_options", "RM_ENGINE_OPTIONS", kSession, kJson, "{}", "a JSON object", false,
     "settings of the engine vllm or onnxruntime, under the engine's own names, such as max_model_len or intra_op_num_threads"},
    {"fallback", "RM_FALLBACK", kSession, kFallback, "warn", "warn, allow or error[:group,...] with groups routing, capture, compile, device, correctness, cache, training", false,
     "what happens when a call cannot be accelerated: warn runs it in PyTorch and warns once for each model and reason (of the routing reasons only RM119 warns, the others are in the report); allow runs it in PyTorch without a warning; error raises, but not for RM103, RM108, RM109 and RM112, which are no failures. With groups, as in error:capture,compile, only reasons of these groups raise, and the others warn. Where routing reasons raise, serve_gradients and serve_parts are off, and when_slower is compiled"},
    {"verify", "RM_VERIFY", kSession, kVerify, "auto", "off, first, auto, always, a number n, or p=<probability>", false,
     "which calls PyTorch runs as well, so that the results can be compared: first means the first call of each program, and its first call with other kernels than before; auto means the same and a sample of the later calls, which takes about 0.5 % of the time; always means every call; a number n means every n-th call; p=<probability> picks calls at random; off means only a program's very first call on this machine"},
    {"guard", "RM_GUARD", kSession, kChoice, "default", "default|strict", false,
     "how changed weights are noticed: default by the addresses and version counters of their tensors; strict, for weights on the CPU, also by their contents, a part of them at each call and all of them within 64 calls"},
    {"disable", "RM_DISABLE", kSession, kBool, "false", "", false,
     "true leaves every model to PyTorch"},
    {"hook", "RM_HOOK", kSession, kChoice, "default", "default|all", false,
     "which modules are accelerated without being named: default means models of transformers and sentence-transformers when they are loaded, and other modules at their eval() or to(); all means these and, when it is called, every other module in evaluation mode, such as an unpickled one"},
    {"serve_gradients", "RM_SERVE_GRADIENTS", kSession, kBool, "true", "", false,
     "true also accelerates calls that are made without torch.no_grad(), of models in evaluation mode; if the outputs are differentiated, PyTorch runs the original forward again to compute the gradients"},
    {"serve_parts", "RM_SERVE_PARTS", kSession, kBool, "true", "", false,
     "if a model cannot be captured as a whole, true accelerates its largest modules that can be captured, and PyTorch runs the rest; false leaves the whole model to PyTorch"},
    {"verbose", "RM_VERBOSE", kSession, kInt, "0", "0..1", false,
     "0 prints to stderr the progress of compilations for a device that take longer than 2 s; 1 prints that of all of them, and which programs are loaded from the cache"},
    {"backend_path", "RM_BACKEND_PATH", kSession, kText, "", "absolute paths separated by ':'", false,
     "further files or folders from which backend plugins are loaded"},
    {"hardware_root", "RM_HARDWARE_ROOT", kSession, kText, "/", "an absolute path", false,
     "the folder whose dev/ and sys/ are read to find devices; tests set it to describe another machine"},
    {"sim_npu", "RM_SIM_NPU", kSession, kBool, "false", "", false,
     "true makes npu:N the simulated NPU where the machine has no physical NPU with that number"},

    // compile_options
    {"optimization_level", "RM_OPTIMIZATION_LEVEL", kCompile, kInt, "1", "0..1", true,
     "0 compiles each operator by itself; 1 also fuses operators into larger ones"},
    {"precision", "RM_PRECISION", kCompile, kChoice, "auto", "auto|bf16|int8|int4", true,
     "the number format of models: auto is the model's own; int8 and int4 (CPU and NVIDIA GPUs) store the weights of linear layers in 8 or 4 bits; bf16 is for NPUs that compute in bf16, and has no effect on CPUs and GPUs", "bf16"},
    {"group_size", "RM_GROUP_SIZE", kCompile, kChoice, "auto", "auto|32|64|128", true,
     "how many consecutive weights share one scale when precision is int8 or int4; auto is 128 for int8, and 32 for int4 (128 on a GPU)"},
    {"activations", "RM_ACTIVATIONS", kCompile, kChoice, "auto", "auto|int8|int16", true,
     "when precision is int8 or int4 on a CPU, the integers to which the inputs of linear layers are rounded; only inputs of at most eight rows (tokens that are computed at once) are rounded, as in generation; auto is int8"},
    {"pack_weights", "RM_PACK_WEIGHTS", kCompile, kChoice, "auto", "auto|never|first|later|spare", false,
     "when weights are copied into the memory layout that the kernels read fastest: first means before the first call; later means in the background, after a shape was called twice; spare means the same, but only for weights stored as [inputs, outputs], which are slow to read otherwise; never means not at all; auto is spare for models that generate text and later for all others"},
    {"batch_threads", "RM_BATCH_THREADS", kCompile, kBool, "true", "", false,
     "true computes generations that several threads run on one model at the same time as one batch"},
    {"prompt_lookup", "RM_PROMPT_LOOKUP", kCompile, kChoice, "auto", "auto|on|always|off", false,
     "whether greedy generation guesses the next tokens from repetitions in the text and checks several of them at once: auto does so for float32 models, and only while it is measured to be faster; on does the same for all models (where two tokens are nearly tied, the other one may be chosen); always does so without measuring; off never does"},
    {"compile_mode", "RM_COMPILE_MODE", kCompile, kChoice, "sync", "sync|async", false,
     "where the first call of a kind is captured and compiled: sync does it within the call, which takes some seconds; async does it in a background process, and PyTorch runs the calls until the program is ready (only for models of installed packages, on the CPU)"},
    {"when_slower", "RM_WHEN_SLOWER", kCompile, kChoice, "eager", "eager|compiled", false,
     "what runs calls whose compiled program was measured to be slower than PyTorch: eager is PyTorch; compiled is the program nevertheless"},
    {"batch_size", "RM_BATCH_SIZE", kCompile, kIntList, "", "positive integers, comma separated", true,
     "the batch sizes to compile for, on devices that need fixed sizes; a batch is padded to the next size, and a batch of one is compiled as it is; if not given, powers of two are compiled when calls need them"},
    {"sequence_length", "RM_SEQUENCE_LENGTH", kCompile, kIntList, "", "positive integers, comma separated", true,
     "the sequence lengths to compile for, on devices that need fixed sizes; a sequence is padded to the next length; if not given, powers of two are compiled when calls need them"},
    {"timeout_s", "RM_TIMEOUT_S", kCompile, kNumber, "21600", "0..86400", false,
     "how many seconds a worker process may take to compile a program for a device before it is ended; 0 sets no limit, but stall_timeout_s still ends a process that is inactive"},
    {"load_timeout_s", "RM_LOAD_TIMEOUT_S", kCompile, kNumber, "3600", "0..86400", false,
     "how many seconds a worker process may take to load a compiled program into a device before it is ended; 0 sets no limit, but stall_timeout_s still ends a process that is inactive"},
    {"stall_timeout_s", "RM_STALL_TIMEOUT_S", kCompile, kNumber, "600", "0..86400", false,
     "how many seconds a worker process that compiles or loads may be inactive (not compute, read, write or report) before it is ended; 0 sets no limit"},
    {"execute_timeout_s", "RM_EXECUTE_TIMEOUT_S", kCompile, kNumber, "300", "0..86400", false,
     "how many seconds a call may take on a device in a worker process before it is given up and the process is restarted; 0 sets no limit"},
    {"plugin_options", "RM_PLUGIN_OPTIONS", kCompile, kText, "", "a JSON object: plugin to its options", false,
     "options of devices' plugins, by the name of the plugin, such as {\"rbln\": {\"num_devices\": 2}}; in code they are given as compile_options={'rbln': {'num_devices': 2}}; if the options of its own device change, a program is compiled anew"},

    // The compile cache
    {"cache_dir", "RM_CACHE_DIR", kCache, kPath, "", "a directory", false,
     "the folder of compiled programs; if not given, $XDG_CACHE_HOME/rm_abstract, or ~/.rm_abstract/cache if that variable is no absolute path"},
    {"cache_mode", "RM_CACHE_MODE", kCache, kChoice, "readwrite", "off|read|readwrite|refresh|check", false,
     "readwrite uses entries and stores new ones; read uses entries and stores none; off does neither; refresh captures and compiles again, also what could not be captured before, and check compiles again what it finds: both log an error if the result differs from the entry"},
    {"cache_max_size", "RM_CACHE_MAX_SIZE", kCache, kBytes, "10G", "bytes, with K, M, G or T; 0 is no limit", false,
     "when the cache is larger than this, the entries that were not used for the longest time are removed"},
    {"cache_max_age", "RM_CACHE_MAX_AGE", kCache, kDuration, "30d", "a duration with s, m, h or d; 0 is no limit", false,
     "entries that were not used for this long are removed"},
    {"cache_memory_size", "RM_CACHE_MEMORY_SIZE", kCache, kBytes, "256M", "bytes, with K, M, G or T", false,
     "how many bytes of entries this process keeps in memory"},
    {"cache_lock_timeout", "RM_CACHE_LOCK_TIMEOUT", kCache, kDuration, "600s", "a duration with s, m, h or d", false,
     "how long to wait for another process that compiles the same program, before this process compiles it too"},
    {"cache_shared_dir", "RM_CACHE_SHARED_DIR", kCache, kPath, "", "a directory", false,
     "a second cache folder, which is only read"},
    {"cache_secret_file", "RM_CACHE_SECRET_FILE", kCache, kPath, "", "a file", false,
     "a file with a secret; entries are then signed with it, and entries of cache_shared_dir are used only if they carry this signature"},
    {"cache_trust", "RM_CACHE_TRUST", kCache, kBool, "false", "", false,
     "true uses the cache folder even if other users can write to it; whoever can write to it can run code as you"},
    {"cache_salt", "RM_CACHE_SALT", kCache, kText, "", "any text", true,
     "any text; entries that were made with another text are not used"},

    // Looking inside
    {"force_kernel", "RM_FORCE_KERNEL", kDebug, kText, "", "op:kernel", true,
     "the kernel to use for one operator wherever it supports the operation, such as gemm:gemm_packed_avx2"},
    {"self_check", "RM_SELF_CHECK", kDebug, kChoice, "auto", "auto|off|always", false,
     "whether a kernel is compared with its operator's reference, on random numbers, before it is used: auto does so once for each machine and kind of problem, and keeps the verdict in the cache folder; always does so once in each process; off never does. A kernel that is known to be wrong is not used in any case"},
    {"cpu_isa", "RM_CPU_ISA", kDebug, kText, "auto", "auto, or one set of the machine as rm-abstract devices names it, such as baseline, avx2, avx512, avx512+vnni", false,
     "the instruction sets that kernels on the CPU may use; read when the first plugin is loaded"},
    {"log", "RM_LOG", kDebug, kLogSpec, "", "topic[=level],...", false,
     "the topics that are logged to stderr, and at which level, such as cache=debug"},
    {"worker_log_dir", "RM_WORKER_LOG_DIR", kDebug, kPath, "", "a directory", false,
     "the folder for the output of the worker processes of devices, one file for each process; error messages name the file; if not given, only the end of the output is kept, in memory"},
    {"dump_ir", "RM_DUMP_IR", kDebug, kPath, "", "a directory", false,
     "the folder into which the program is written after each pass of the compiler"},
};
// clang-format on

[[noreturn]] void throw_unknown(std::string_view name, std::string_view source) {
  const auto nearest = std::min_element(
      std::begin(kTable), std::end(kTable), [&](const OptionSpec& a, const OptionSpec& b) {
        return edit_distance(a.name, name) < edit_distance(b.name, name);
      });
  throw_invalid("[options] expected the name of an option from " + std::string(source) + ", got '" +
                std::string(name) + "'; try '" + std::string(nearest->name) + "'");
}

}  // namespace

std::span<const OptionSpec> option_table() { return kTable; }

const OptionSpec* find_option(std::string_view name) {
  const auto row = std::find_if(std::begin(kTable), std::end(kTable),
                                [&](const OptionSpec& spec) { return spec.name == name; });
  return row == std::end(kTable) ? nullptr : row;
}

Options Options::resolve(const Settings& arguments, const Settings& file,
                         std::string_view file_name) {
  for (const auto& [name, text] : arguments) {
    if (!find_option(name)) throw_unknown(name, "argument");
  }
  for (const auto& [name, text] : file) {
    if (!find_option(name)) throw_unknown(name, file_name);
  }
  Options options;
  for (const OptionSpec& spec : kTable) {
    std::string source = "default";
    std::string text(spec.default_text);
    if (const auto argument = arguments.find(spec.name); argument != arguments.end()) {
      source = "argument";
      text = argument->second;
    } else if (const char* env =
                   spec.env.empty() ? nullptr : std::getenv(std::string(spec.env).c_str())) {
      source = "environment " + std::string(spec.env);
      text = env;
    } else if (const auto entry = file.find(spec.name); entry != file.end()) {
      source = file_name;
      text = entry->second;
    }
    text = canonical_option(spec, text, source);
    options.values_.emplace(spec.name, Value{std::move(text), std::move(source)});
  }
  return options;
}

const Options::Value& Options::value(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) throw_unknown(name, "a lookup");
  return found->second;
}

bool Options::flag(std::string_view name) const { return text(name) == "true"; }

int64_t Options::integer(std::string_view name) const { return std::stoll(text(name)); }

double Options::number(std::string_view name) const { return std::stod(text(name)); }

std::vector<int64_t> Options::integers(std::string_view name) const {
  std::vector<int64_t> out;
  const std::string& list = text(name);
  for (size_t at = 0; at < list.size();) {
    size_t used = 0;
    out.push_back(std::stoll(list.substr(at), &used));
    at += used + 1;
  }
  return out;
}

std::string Options::artefact_bytes() const {
  std::string out;
  const auto frame = [&out](std::string_view text) {
    for (int shift = 0; shift < 64; shift += 8) {
      out += static_cast<char>(static_cast<uint64_t>(text.size()) >> shift);
    }
    out += text;
  };
  for (const OptionSpec& spec : kTable) {
    if (!spec.affects_artefact) continue;
    frame(spec.name);
    frame(text(spec.name));
  }
  return out;
}

}  // namespace rm
