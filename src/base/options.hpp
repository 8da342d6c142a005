// THE options table: every option of the product, with its environment variable, type, default,
// accepted values and whether it changes artefacts. docs/ and --help are generated from it.
// An option changes artefacts (and so is in every cache key) unless its row says it does not.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rm {

enum class OptionType {
  kBool,      // "true" | "false" (also 1/0, yes/no, on/off)
  kInt,       // accepted: "min..max" or empty
  kNumber,    // seconds and the like; accepted: "min..max" or empty
  kChoice,    // accepted: "a|b|c"
  kBytes,     // 10G, 512M, 4096; canonical: the number of bytes
  kDuration,  // 30d, 12h, 90s; canonical: seconds
  kIntList,   // "1,4,8"; positive, sorted, without repetition
  kText,
  kPath,
  kJson,      // an object as JSON text; canonical: compact, sorted keys
  kDevice,    // name[:index]
  kFallback,  // warn | allow | error[:group,...]
  kVerify,    // off | first | auto | always | <every n-th call> | p=<probability>
  kLogSpec    // see base/log.hpp
};

enum class OptionGroup { kSession, kCompile, kCache, kDebug };

struct OptionSpec {
  std::string_view name;  // argument of init()/compile_options and key of rm_abstract.toml
  std::string_view env;   // empty: not settable from the environment
  OptionGroup group;
  OptionType type;
  std::string_view default_text;
  std::string_view accepted;  // meaning depends on the type; shown in messages and documentation
  bool affects_artefact;
  std::string_view help;
  std::string_view unbuilt = {};  // "a|b": values that have no effect on the CPU and on GPUs
};

/// All rows, in documentation order.
std::span<const OptionSpec> option_table();
/// nullptr when there is no such option.
const OptionSpec* find_option(std::string_view name);
std::string_view option_type_name(OptionType type);
std::string_view option_group_name(OptionGroup group);
/// The values this option takes, in words.
std::string accepted_values(const OptionSpec& spec);

/// The canonical form of `text`: equal settings have equal texts. Throws rm::Error
/// (RM_INVALID_ARGUMENT) that names `source` ("argument", "environment RM_DEVICE", a toml path)
/// and what is accepted.
std::string canonical_option(const OptionSpec& spec, std::string_view text,
                             std::string_view source);

/// A resolved set of options. Immutable once built: argument > environment > file > default.
class Options {
 public:
  using Settings = std::map<std::string, std::string, std::less<>>;

  struct Value {
    std::string text;    // canonical
    std::string source;  // "argument", "environment RM_X", the toml file, or "default"
  };

  /// Arguments win over the process environment, that over `file` (values of rm_abstract.toml,
  /// whose path is `file_name`). An unknown name in either throws, with the nearest known one.
  static Options resolve(const Settings& arguments = {}, const Settings& file = {},
                         std::string_view file_name = "rm_abstract.toml");

  /// Throws rm::Error for a name that is not in the table.
  const Value& value(std::string_view name) const;
  const std::string& text(std::string_view name) const { return value(name).text; }
  bool flag(std::string_view name) const;
  int64_t integer(std::string_view name) const;  // also bytes and seconds of a duration
  double number(std::string_view name) const;
  std::vector<int64_t> integers(std::string_view name) const;

  /// Name and value of every option that affects artefacts, length-framed, in table order:
  /// the `options` field of a cache key.
  std::string artefact_bytes() const;

  const std::map<std::string, Value, std::less<>>& values() const { return values_; }

 private:
  std::map<std::string, Value, std::less<>> values_;
};

}  // namespace rm
