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

// What a row without this last word says is built; a row with it is checked, and its user told.
constexpr bool kNotYet = false;

// clang-format off
constexpr OptionSpec kTable[] = {
    // name, env, group, type, default, accepted, affects_artefact, help, built, unbuilt
    //
    // Where and how to run. The device is in the key as target and backend identity, not by name.
    {"device", "RM_DEVICE", kSession, kDevice, "auto", "auto, cpu, gpu[:N], cuda[:N], npu[:N], rbln[:N], furiosa[:N], sim[:N], or a plugin's name[:N]", false,
     "the device that runs the models; auto is the usable one that its plugin scores highest"},
    {"inference_engine", "RM_ENGINE", kSession, kChoice, "auto", "auto|native|torch|vllm|onnxruntime", false,
     "what runs the models: native is rm_abstract's own compiler, torch leaves every model to PyTorch, vllm generates text with vLLM in a process of its own (everything else is native's), onnxruntime runs models with ONNX Runtime on the CPU, auto is native"},
    {"engine_options", "RM_ENGINE_OPTIONS", kSession, kJson, "{}", "a JSON object", false,
     "settings of the inference engines vllm and onnxruntime, by their own names, such as max_model_len or intra_op_num_threads"},
    {"fallback", "RM_FALLBACK", kSession, kFallback, "warn", "warn, allow or error[:group,...] with groups routing, capture, compile, device, correctness, cache, training", false,
     "what happens when a call cannot be accelerated: warn once for each reason and run PyTorch, allow (run PyTorch silently), or error (raise); with groups, only these groups of reason codes raise and the others warn"},
    {"verify", "RM_VERIFY", kSession, kVerify, "auto", "off, first, auto, always, a number n, or p=<probability>", false,
     "which calls PyTorch runs as well, to compare the results: first is the first call of every program and of every set of kernels in it, auto also samples calls for about 0.5 % of the time, always is every call, n every n-th, p each with this probability, off only the first call of a program that this machine never compared"},
    {"guard", "RM_GUARD", kSession, kChoice, "default", "default|strict", false,
     "strict also compares a part of the weights' contents at every call, all of them within 64 calls, for writes that leave no other trace"},
    {"disable", "RM_DISABLE", kSession, kBool, "false", "", false,
     "true leaves every model as it is"},
    {"hook", "RM_HOOK", kSession, kChoice, "default", "default|all", false,
     "which modules are caught: default catches models of transformers and sentence-transformers, and others at their eval() or to(); all also catches every other module in evaluation mode when it is called, such as one that was unpickled or prepared before init()"},
    {"serve_gradients", "RM_SERVE_GRADIENTS", kSession, kBool, "true", "", false,
     "also serve calls of a model in evaluation mode that are made without torch.no_grad(); if the outputs are differentiated, the original forward runs again for the gradients"},
    {"verbose", "RM_VERBOSE", kSession, kInt, "0", "0..3", false,
     "1 prints to stderr which programs are compiled for a device or loaded from the cache"},
    {"backend_path", "RM_BACKEND_PATH", kSession, kText, "", "absolute paths separated by ':'", false,
     "files or folders from which backend plugins are loaded as well"},
    {"hardware_root", "RM_HARDWARE_ROOT", kSession, kText, "/", "an absolute path", false,
     "the folder in which /dev and /sys are read to find devices; tests set it to describe another machine"},
    {"sim_npu", "RM_SIM_NPU", kSession, kBool, "false", "", false,
     "true lets npu:N mean the simulated NPU when the machine has no physical one with that number"},

    // compile_options
    {"optimization_level", "RM_OPTIMIZATION_LEVEL", kCompile, kInt, "2", "0..3", true,
     "0 compiles operators one by one, 1 also fuses them into larger ones; 2 and 3 are the same as 1 in this version"},
    {"precision", "RM_PRECISION", kCompile, kChoice, "auto", "auto|bf16|int8|int4", true,
     "auto computes in the model's own type; int8 and int4 store weights of linear layers in 8 or 4 bits (on the CPU); bf16 lets a device that computes in bf16 do so for models of another type, and does nothing on the CPU", true, "bf16"},
    {"group_size", "RM_GROUP_SIZE", kCompile, kChoice, "auto", "auto|32|64|128", true,
     "how many consecutive weights share one scale under precision int8 and int4; auto is 128 for int8 and 32 for int4"},
    {"activations", "RM_ACTIVATIONS", kCompile, kChoice, "auto", "auto|int8|int16", true,
     "the integers to which int8 and int4 products round their inputs where these have at most eight rows, as in the generation of tokens; inputs with more rows are not rounded; auto is int8"},
    {"pack_weights", "RM_PACK_WEIGHTS", kCompile, kChoice, "auto", "auto|never|first|later|spare", false,
     "when weights are copied into the memory layout that the kernels read fastest: first (before the first call), later (in the background after a shape was called twice) or never; spare is later, but only for weights stored as [inputs, outputs], which would be slow otherwise; auto is spare for models that generate text and later for all others"},
    {"batch_threads", "RM_BATCH_THREADS", kCompile, kBool, "true", "", false,
     "true lets generations that several threads run on one model at the same time share their steps as one batch"},
    {"prompt_lookup", "RM_PROMPT_LOOKUP", kCompile, kChoice, "auto", "auto|on|always|off", false,
     "lets greedy generation guess the next tokens from repetitions in the text and check several at once, where that was measured to be faster: auto for float32 models, on for all models (where two tokens are nearly tied, the other one may be chosen), always without measuring, off never"},
    {"compile_mode", "RM_COMPILE_MODE", kCompile, kChoice, "sync", "sync|async", false,
     "when a call is captured and compiled for the first time: sync in the call, which waits some seconds; async in a process in the background, and PyTorch runs the calls until the program is there (models of installed packages on the CPU)"},
    {"when_slower", "RM_WHEN_SLOWER", kCompile, kChoice, "eager", "eager|compiled", false,
     "what runs the calls for which a compiled program on the CPU was measured to be slower than PyTorch: eager is PyTorch, compiled is the program all the same"},
    {"batch_size", "RM_BATCH_SIZE", kCompile, kIntList, "", "positive integers, comma separated", true,
     "the batch sizes to compile for on devices that need fixed sizes; smaller batches are padded to the next one, except for a batch of one; empty: powers of two, as calls need them"},
    {"sequence_length", "RM_SEQUENCE_LENGTH", kCompile, kIntList, "", "positive integers, comma separated", true,
     "the sequence lengths to compile for on devices that need fixed sizes; shorter sequences are padded to the next one; empty: powers of two, as calls need them"},
    {"timeout_s", "RM_TIMEOUT_S", kCompile, kNumber, "21600", "0..86400", false,
     "seconds after which compiling or loading a program for a device in a worker process is given up; 0 waits as long as the process does something"},
    {"stall_timeout_s", "RM_STALL_TIMEOUT_S", kCompile, kNumber, "600", "0..86400", false,
     "seconds in which a worker process that compiles or loads may do nothing at all (compute, read, write or report) before it is given up; 0 waits for ever"},
    {"execute_timeout_s", "RM_EXECUTE_TIMEOUT_S", kCompile, kNumber, "300", "0..86400", false,
     "seconds after which a call on a device in a worker process is given up and the process is restarted; 0 waits for ever"},
    {"plugin_options", "RM_PLUGIN_OPTIONS", kCompile, kText, "", "a JSON object: plugin to its options", false,
     "options of devices' plugins, for each plugin by its name; in code they are written as compile_options={'rbln': {'num_devices': 2}}; those of the device that compiles are in the key of its artefacts"},

    // The compile cache
    {"cache_dir", "RM_CACHE_DIR", kCache, kPath, "", "a directory", false,
     "the folder of compiled programs; empty: $XDG_CACHE_HOME/rm_abstract, else ~/.rm_abstract/cache"},
    {"cache_mode", "RM_CACHE_MODE", kCache, kChoice, "readwrite", "off|read|readwrite|refresh|check", false,
     "readwrite uses entries and stores new ones, read stores none, off does neither; refresh and check compile although there is an entry and log an error if the two differ"},
    {"cache_max_size", "RM_CACHE_MAX_SIZE", kCache, kBytes, "10G", "bytes, with K, M, G or T; 0 is no limit", false,
     "above this size the entries that were not used for the longest time are removed"},
    {"cache_derived_max_size", "RM_CACHE_DERIVED_MAX_SIZE", kCache, kBytes, "4G", "bytes, with K, M, G or T; 0 is no limit", false,
     "the same limit for the entries that hold packed or quantised weights"},
    {"cache_max_age", "RM_CACHE_MAX_AGE", kCache, kDuration, "30d", "a duration with s, m, h or d; 0 is no limit", false,
     "entries that were not used for this long are removed"},
    {"cache_memory_size", "RM_CACHE_MEMORY_SIZE", kCache, kBytes, "256M", "bytes, with K, M, G or T", false,
     "the size of the entries that this process keeps in memory"},
    {"cache_lock_timeout", "RM_CACHE_LOCK_TIMEOUT", kCache, kDuration, "600s", "a duration with s, m, h or d", false,
     "how long to wait while another process compiles the same program; then this process compiles it too"},
    {"cache_shared_dir", "RM_CACHE_SHARED_DIR", kCache, kPath, "", "a directory", false,
     "a second cache folder, which is read and never written"},
    {"cache_secret_file", "RM_CACHE_SECRET_FILE", kCache, kPath, "", "a file", false,
     "a file with a secret: entries written with it are signed, and entries of cache_shared_dir are used only if they are signed with it"},
    {"cache_trust", "RM_CACHE_TRUST", kCache, kBool, "false", "", false,
     "true uses a cache folder although other users can write to it; whoever can write to it can run code as you"},
    {"cache_salt", "RM_CACHE_SALT", kCache, kText, "", "any text", true,
     "any text; entries made with another text are not used"},

    // Looking inside
    {"force_kernel", "RM_FORCE_KERNEL", kDebug, kText, "", "op:kernel", true,
     "use this kernel for every operation of this operator that the kernel supports"},
    {"self_check", "RM_SELF_CHECK", kDebug, kChoice, "auto", "auto|off|always", false,
     "whether a kernel is run on random numbers and compared with its operator's reference before it is used: auto once for each machine and kind of problem (the verdict is kept in the cache folder), always once for each process, off never; a kernel that is known to be wrong is never used"},
    {"cpu_isa", "RM_CPU_ISA", kDebug, kText, "auto", "auto, or one set of the machine as rm-abstract devices names it, such as baseline, avx2, avx512, avx512+vnni", false,
     "the instruction sets that kernels on the CPU may use; read when the first plugin is loaded"},
    {"log", "RM_LOG", kDebug, kLogSpec, "", "topic[=level],...", false,
     "which topics to log to stderr, and at which level"},
    {"worker_log_dir", "RM_WORKER_LOG_DIR", kDebug, kPath, "", "a directory", false,
     "the folder that keeps everything that worker processes of devices write, one file for each process; errors name the file; empty: the end is kept in memory"},
    {"dump_ir", "RM_DUMP_IR", kDebug, kPath, "", "a directory", false,
     "the folder into which the program is written after every compiler pass"},
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
