// The rows, and how a value is found among argument, environment, file and default.
#include "base/options.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

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
     "device that runs the model; auto takes the usable backend with the highest score"},
    {"inference_engine", "RM_ENGINE", kSession, kChoice, "auto", "auto|native|torch|onnxruntime|vllm", false,
     "engine that serves a model; torch passes calls through", true, "onnxruntime|vllm"},
    {"engine_options", "RM_ENGINE_OPTIONS", kSession, kJson, "{}", "a JSON object", true,
     "options handed to the engine", kNotYet},
    {"fallback", "RM_FALLBACK", kSession, kFallback, "warn", "warn, allow or error[:group,...] with groups routing, capture, compile, device, correctness, cache", false,
     "what happens when something cannot be accelerated"},
    {"verify", "RM_VERIFY", kSession, kVerify, "first", "off, first, always, a number of calls, or p=<probability>", false,
     "which calls are compared with the original", kNotYet},
    {"guard", "RM_GUARD", kSession, kChoice, "default", "default|strict", false,
     "strict also samples weights for writes that change neither pointer nor version", kNotYet},
    {"compile_mode", "RM_COMPILE", kSession, kChoice, "sync", "sync|async", false,
     "async serves the original until the plan is ready", kNotYet},
    {"disable", "RM_DISABLE", kSession, kBool, "false", "", false,
     "leave every model alone"},
    {"verbose", "RM_VERBOSE", kSession, kInt, "0", "0..3", false,
     "1 tells on stderr what is compiled for a device and loaded from the cache"},
    {"backend_path", "RM_BACKEND_PATH", kSession, kText, "", "absolute paths separated by ':'", false,
     "more folders or files to load backend plugins from"},
    {"hardware_root", "RM_HARDWARE_ROOT", kSession, kText, "/", "an absolute path", false,
     "where /dev and /sys are looked for: for tests on a made-up machine"},
    {"sim_npu", "RM_SIM_NPU", kSession, kBool, "false", "", false,
     "let npu:N name the simulated device when no physical one is left"},

    // compile_options
    {"optimization_level", "RM_OPTIMIZATION_LEVEL", kCompile, kInt, "2", "0..3", true,
     "0 runs operators one by one, 1 fuses, 2 also packs weights, 3 also searches"},
    {"precision", "RM_PRECISION", kCompile, kChoice, "auto", "auto|fp32|fp16|bf16|int8|int4", true,
     "auto keeps the model's dtype; int8 and int4 are weight-only and for the CPU", true, "fp32|fp16|bf16"},
    {"group_size", "RM_GROUP_SIZE", kCompile, kChoice, "auto", "auto|32|64|128", true,
     "weights of int8 and int4 that share a scale; auto is 128 for int8 and 32 for int4"},
    {"activations", "RM_ACTIVATIONS", kCompile, kChoice, "auto", "auto|int8|int16", true,
     "what products with int8 and int4 weights round up to eight rows of activations to; auto is int8"},
    {"pack_weights", "RM_PACK_WEIGHTS", kCompile, kChoice, "auto", "auto|never|first|later|spare", false,
     "copy weights into the layouts kernels like best: before the first call, behind the second call of a shape (later, and auto) or never; spare packs only weights that lie as [K,N] and is what auto means for text generation"},
    {"batch_threads", "RM_BATCH_THREADS", kCompile, kBool, "true", "", false,
     "greedy generations that several threads run on one model share their steps as one batch"},
    {"prompt_lookup", "RM_PROMPT_LOOKUP", kCompile, kChoice, "auto", "auto|on|always|off", false,
     "greedy generation takes drafts from what the text said before and checks several tokens at once, where measured to win: auto in fp32, on in every precision (nearly tied tokens may differ there); always checks every draft"},
    {"when_slower", "RM_WHEN_SLOWER", kCompile, kChoice, "eager", "eager|compiled", false,
     "what serves calls at which a program on the CPU was measured to be slower than PyTorch"},
    {"batch_size", "RM_BATCH_SIZE", kCompile, kIntList, "", "positive integers, comma separated", true,
     "batch sizes to compile for on devices of fixed shapes; empty: powers of two, as they come; a batch of one is a program of its own"},
    {"sequence_length", "RM_SEQUENCE_LENGTH", kCompile, kIntList, "", "positive integers, comma separated", true,
     "sequence lengths to compile for on devices of fixed shapes; empty: powers of two, as they come"},
    {"dynamic", "RM_DYNAMIC", kCompile, kBool, "true", "", true,
     "capture with symbolic sizes where the device allows it", kNotYet},
    {"autotune", "RM_AUTOTUNE", kCompile, kChoice, "off", "off|quick|full", true,
     "measure kernels instead of trusting the cost model", kNotYet},
    {"deterministic", "RM_DETERMINISTIC", kCompile, kBool, "false", "", true,
     "only kernels whose result does not depend on scheduling", kNotYet},
    {"memory_budget", "RM_MEMORY_BUDGET", kCompile, kBytes, "0", "bytes, with K, M, G or T; 0 is no limit", true,
     "most memory a plan may use", kNotYet},
    {"timeout_s", "RM_TIMEOUT_S", kCompile, kNumber, "0", "0..86400", false,
     "give up compiling after that many seconds; 0 is never"},
    {"execute_timeout_s", "RM_EXECUTE_TIMEOUT_S", kCompile, kNumber, "300", "0..86400", false,
     "give up a call on a device in a worker after that many seconds and restart it; 0 is never"},
    {"rbln", "", kCompile, kJson, "{}", "a JSON object", true,
     "options of the Rebellions compiler", kNotYet},
    {"furiosa", "", kCompile, kJson, "{}", "a JSON object", true,
     "options of the FuriosaAI compiler", kNotYet},

    // The compile cache
    {"cache_dir", "RM_CACHE_DIR", kCache, kPath, "", "a directory", false,
     "where artefacts are kept; default $XDG_CACHE_HOME/rm_abstract or ~/.rm_abstract/cache"},
    {"cache_mode", "RM_CACHE_MODE", kCache, kChoice, "readwrite", "off|read|readwrite|refresh|check", false,
     "refresh compiles although there is an entry, check compares what both give"},
    {"cache_max_size", "RM_CACHE_MAX_SIZE", kCache, kBytes, "10G", "bytes, with K, M, G or T; 0 is no limit", false,
     "evict the least recently used entries above this size"},
    {"cache_derived_max_size", "RM_CACHE_DERIVED_MAX_SIZE", kCache, kBytes, "4G", "bytes, with K, M, G or T; 0 is no limit", false,
     "the same for packed and quantised weights alone"},
    {"cache_max_age", "RM_CACHE_MAX_AGE", kCache, kDuration, "30d", "a duration with s, m, h or d; 0 is no limit", false,
     "evict what was not used for that long"},
    {"cache_memory_size", "RM_CACHE_MEMORY_SIZE", kCache, kBytes, "256M", "bytes, with K, M, G or T", false,
     "entries kept open in this process"},
    {"cache_lock_timeout", "RM_CACHE_LOCK_TIMEOUT", kCache, kDuration, "600s", "a duration with s, m, h or d", false,
     "how long to wait for another process that compiles the same artefact"},
    {"cache_shared_dir", "RM_CACHE_SHARED_DIR", kCache, kPath, "", "a directory", false,
     "a second tier that is only read"},
    {"cache_secret_file", "RM_CACHE_SECRET_FILE", kCache, kPath, "", "a file", false,
     "secret that authenticates entries: written ones carry a code, shared ones must"},
    {"cache_trust", "RM_CACHE_TRUST", kCache, kBool, "false", "", false,
     "use a cache directory that others can write to"},
    {"cache_salt", "RM_CACHE_SALT", kCache, kText, "", "any text", true,
     "part of every key: another text is another cache"},

    // Looking inside
    {"force_kernel", "RM_FORCE_KERNEL", kDebug, kText, "", "op:kernel", true,
     "use this kernel for every node of the operator that it supports"},
    {"log", "RM_LOG", kDebug, kLogSpec, "", "topic[=level],...", false,
     "diagnostics by topic on stderr"},
    {"dump_ir", "RM_DUMP_IR", kDebug, kPath, "", "a directory", false,
     "write the graph there after every pass"},
};
// clang-format on

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

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
