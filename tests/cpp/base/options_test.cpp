// The options table: precedence, canonical forms, refusals that say what is accepted.
#include "base/options.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "base/error.hpp"

using rm::Options;

namespace {

std::string canonical(const char* name, const char* text) {
  return rm::canonical_option(*rm::find_option(name), text, "test");
}

/// The canonical form of a JSON option's text.
std::string json(const char* text) {
  const rm::OptionSpec spec{"vendor", "",   rm::OptionGroup::kCompile, rm::OptionType::kJson, "{}",
                            "a JSON object", true, "options of a compiler"};
  return rm::canonical_option(spec, text, "test");
}

struct ScopedEnv {
  ScopedEnv(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedEnv() { unsetenv(name_); }
  const char* name_;
};

}  // namespace

TEST_CASE("names and environment variables are unique, and every default is accepted") {
  std::set<std::string_view> names, envs;
  for (const rm::OptionSpec& spec : rm::option_table()) {
    CHECK(names.insert(spec.name).second);
    if (!spec.env.empty()) CHECK(envs.insert(spec.env).second);
    CHECK_NOTHROW(rm::canonical_option(spec, spec.default_text, "default"));
    CHECK_FALSE(spec.help.empty());
  }
}

TEST_CASE("an argument wins over the environment, that over the file, that over the default") {
  CHECK(Options::resolve().text("device") == "auto");
  CHECK(Options::resolve({}, {{"device", "cpu"}}).text("device") == "cpu");
  CHECK(Options::resolve({}, {{"device", "cpu"}}, "a.toml").value("device").source == "a.toml");
  const ScopedEnv env("RM_DEVICE", "GPU:01");
  CHECK(Options::resolve({}, {{"device", "cpu"}}).text("device") == "gpu:1");
  CHECK(Options::resolve({}, {}).value("device").source == "environment RM_DEVICE");
  CHECK(Options::resolve({{"device", "sim"}}, {{"device", "cpu"}}).text("device") == "sim");
}

TEST_CASE("a value that is not understood names its source and what is accepted") {
  const ScopedEnv env("RM_CACHE_MODE", "readonly");
  CHECK_THROWS_WITH_AS(Options::resolve(), doctest::Contains("environment RM_CACHE_MODE"),
                       rm::Error);
  CHECK_THROWS_WITH_AS(Options::resolve(),
                       doctest::Contains("off, read, readwrite, refresh, check"), rm::Error);
}

TEST_CASE("an unknown option is refused with the nearest known one") {
  CHECK_THROWS_WITH_AS(Options::resolve({{"optimisation_level", "2"}}),
                       doctest::Contains("try 'optimization_level'"), rm::Error);
  CHECK_THROWS_WITH_AS(Options::resolve({}, {{"cachedir", "x"}}, "p/rm_abstract.toml"),
                       doctest::Contains("p/rm_abstract.toml"), rm::Error);
}

TEST_CASE("equal settings have equal texts") {
  CHECK(canonical("sim_npu", "1") == canonical("sim_npu", "True"));
  CHECK(canonical("cache_max_size", "10G") == canonical("cache_max_size", "10 GiB"));
  CHECK(canonical("cache_max_age", "30d") == canonical("cache_max_age", "720h"));
  CHECK(canonical("batch_size", "[8, 1,4,4]") == "1,4,8");
  CHECK(json(R"({"b": 1, "a": [2]})") == json(R"({"a":[2],"b":1})"));
  CHECK(canonical("fallback", "error:routing, capture") == "error:capture,routing");
  CHECK(canonical("verify", "p=0.010") == "p=0.01");
  CHECK(canonical("timeout_s", "2.50") == "2.5");
}

TEST_CASE("values outside a type are refused") {
  const std::pair<const char*, const char*> bad[] = {{"optimization_level", "2"},
                                                     {"optimization_level", "two"},
                                                     {"precision", "fp64"},
                                                     {"sim_npu", "maybe"},
                                                     {"cache_max_size", "10X"},
                                                     {"cache_max_size", "-1"},
                                                     {"cache_max_size", "99999999999999T"},
                                                     {"batch_size", "0"},
                                                     {"batch_size", "1,,2"},
                                                     {"device", "gpu:x"},
                                                     {"device", "auto:1"},
                                                     {"device", ""},
                                                     {"fallback", "error:"},
                                                     {"fallback", "error:disk"},
                                                     {"verify", "p=2"},
                                                     {"verify", "-1"},
                                                     {"timeout_s", "nan"},
                                                     {"timeout_s", "-1"},
                                                     {"log", "cahce"},
                                                     {"cache_lock_timeout", "5y"}};
  for (const auto& [name, text] : bad) {
    CAPTURE(name);
    CAPTURE(text);
    CHECK_THROWS_AS(canonical(name, text), rm::Error);
  }
  CHECK_THROWS_AS(json("[1]"), rm::Error);
  CHECK_THROWS_AS(json("{"), rm::Error);
}

TEST_CASE("an option that is announced and not built is unknown") {
  for (const char* name : {"autotune", "dynamic", "memory_budget"}) {
    CAPTURE(name);
    CHECK_THROWS_WITH_AS(Options::resolve({{name, "1"}}), doctest::Contains("try '"), rm::Error);
  }
  CHECK_THROWS_WITH_AS(canonical("inference_engine", "tensorrt"),
                       doctest::Contains("auto, native, torch"), rm::Error);
}

TEST_CASE("the key's bytes change exactly with the options that affect artefacts") {
  const std::string base = Options::resolve().artefact_bytes();
  const std::map<std::string, std::string> other = {{"device", "cpu"},
                                                    {"inference_engine", "native"},
                                                    {"engine_options", R"({"seed": 1})"},
                                                    {"plugin_options", R"({"zeta": 1})"},
                                                    {"fallback", "allow"},
                                                    {"verify", "off"},
                                                    {"guard", "strict"},
                                                    {"disable", "true"},
                                                    {"verbose", "1"},
                                                    {"backend_path", "/x"},
                                                    {"hardware_root", "/x"},
                                                    {"sim_npu", "true"},
                                                    {"optimization_level", "0"},
                                                    {"pack_weights", "never"},
                                                    {"precision", "bf16"},
                                                    {"batch_size", "1"},
                                                    {"sequence_length", "8"},
                                                    {"timeout_s", "1"},
                                                    {"load_timeout_s", "7"},
                                                    {"execute_timeout_s", "7"},
                                                    {"stall_timeout_s", "7"},
                                                    {"cache_dir", "/x"},
                                                    {"cache_mode", "read"},
                                                    {"cache_max_size", "1G"},
                                                    {"cache_max_age", "1d"},
                                                    {"cache_memory_size", "1M"},
                                                    {"cache_lock_timeout", "1s"},
                                                    {"cache_shared_dir", "/x"},
                                                    {"cache_secret_file", "/x"},
                                                    {"cache_trust", "true"},
                                                    {"cache_salt", "s"},
                                                    {"group_size", "64"},
                                                    {"activations", "int16"},
                                                    {"batch_threads", "false"},
                                                    {"prompt_lookup", "off"},
                                                    {"compile_mode", "async"},
                                                    {"when_slower", "compiled"},
                                                    {"hook", "all"},
                                                    {"serve_gradients", "false"},
                                                    {"serve_parts", "false"},
                                                    {"force_kernel", "gemm:x"},
                                                    {"self_check", "off"},
                                                    {"cpu_isa", "avx2"},
                                                    {"log", "cache"},
                                                    {"worker_log_dir", "/x"},
                                                    {"dump_ir", "/x"}};
  for (const rm::OptionSpec& spec : rm::option_table()) {
    CAPTURE(spec.name);
    const auto value = other.find(std::string(spec.name));
    REQUIRE(value != other.end());  // a new row needs a value here
    const Options options = Options::resolve({{value->first, value->second}});
    REQUIRE(options.text(spec.name) != Options::resolve().text(spec.name));
    CHECK((options.artefact_bytes() != base) == spec.affects_artefact);
  }
}

TEST_CASE("typed access gives numbers, flags and lists") {
  const Options options = Options::resolve({{"batch_size", "4,1"}, {"cache_max_size", "1K"}});
  CHECK(options.integers("batch_size") == std::vector<int64_t>{1, 4});
  CHECK(options.integers("sequence_length").empty());
  CHECK(options.integer("cache_max_size") == 1024);
  CHECK(options.flag("batch_threads"));
  CHECK_THROWS_AS(options.text("nothing"), rm::Error);
}
