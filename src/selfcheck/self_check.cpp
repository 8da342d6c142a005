// Looks verdicts up, has rows checked, and says loudly what failed.
#include "selfcheck/self_check.hpp"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <mutex>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "ops/registry.hpp"
#include "selfcheck/alike.hpp"
#include "selfcheck/fused.hpp"
#include "selfcheck/row_check.hpp"
#include "selfcheck/verdicts.hpp"

namespace rm::selfcheck {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kVersion = "1";  // of what a check does: older verdicts are not found

std::string_view view(rm_str s) { return {s.data, s.size}; }

/// What a verdict holds on: processor, instruction sets, number of cores.
std::string machine_of(const rm_device_info* device) {
  std::string out = processor_name();
  if (device == nullptr) return out;
  if (device->dl_device_type != kDLCPU) out += "\n" + std::string(view(device->name));
  out += "\n" + std::string(view(device->arch));
  for (size_t i = 0; i < device->properties.size; ++i) {
    const rm_option& o = device->properties.data[i];
    out += "\n" + std::string(view(o.key)) + "=" + std::string(view(o.value));
  }
  return out;
}

Digest key_of(const select::Row& row, uint32_t config, const Shape& shape) {
  Hasher hasher;
  auto framed = [&](std::string_view text) {
    hasher.update(std::to_string(text.size()) + ":").update(text);
  };
  framed(kVersion);
  framed(row.backend);
  framed(row.name());
  framed(view(row.kernel->digest));
  framed(std::to_string(config));
  framed(machine_of(row.device));
  framed(select::Problem(shape.op, shape.inputs, shape.outputs, shape.attrs).key());
  return hasher.digest();
}

/// Rows of another framework compute what the user's own script would have: the reference of an
/// opaque operator is that framework. Nor is there one for operators this core does not know.
bool is_exempt(const select::Row& row, const select::Problem& problem) {
  if (row.is_bridge()) return true;
  const std::string_view op = view(problem.c().op);
  // Low level only: the reference of copy is its operand, of the fused ones fused.cpp's.
  if (op == "copy" || is_fused(op)) return false;
  const ops::OpDef* def = ops::find(op);
  return def == nullptr || def->is(ops::kOpaque) || def->reference == nullptr;
}

bool supports(const select::Row& row, const Shape& shape) {
  if (row.kernel->supports == nullptr) return true;
  const select::Problem problem(shape.op, shape.inputs, shape.outputs, shape.attrs, row.place());
  rm_str why{"", 0};
  return row.kernel->supports(&problem.c(), row.device, &why) != 0;
}

}  // namespace

struct SelfCheck::State {
  explicit State(const Settings& settings)
      : pid(getpid()), verdicts(file_of(settings), settings.writable) {}

  static std::string file_of(const Settings& settings) {
    if (settings.directory.empty()) return {};
    try {
      if (settings.writable) make_directories(settings.directory);
    } catch (const FileError& error) {
      log_debug(LogTopic::kSelect, error.what());
      return {};
    }
    return settings.directory + "/" + hash_bytes(processor_name()).hex().substr(0, 16);
  }

  const pid_t pid;
  std::mutex mutex;  // guards what is below; nothing is checked under it
  Verdicts verdicts;
  std::unordered_map<Digest, std::string> here;  // judged or looked up in this process
  Report report;
};

Mode mode_from(const std::string& name) {
  if (name == "auto") return Mode::kAuto;
  if (name == "off") return Mode::kOff;
  if (name == "always") return Mode::kAlways;
  throw_invalid("[self_check] expected auto, off or always, got '" + name + "'");
}

SelfCheck::SelfCheck(Settings settings)
    : settings_(std::move(settings)), state_(new State(settings_)) {}

SelfCheck::~SelfCheck() {
  State* mine = state_.load();
  if (mine->pid == getpid()) delete mine;  // else the parent's: its lock may be held for ever here
}

SelfCheck::State& SelfCheck::state() const {
  State* current = state_.load(std::memory_order_acquire);
  if (current->pid == getpid()) return *current;
  auto fresh = std::make_unique<State>(settings_);
  if (state_.compare_exchange_strong(current, fresh.get())) return *fresh.release();
  return *current;
}

std::string SelfCheck::refusal(const select::Row& row, uint32_t config,
                               const select::Problem& problem) {
  if (is_exempt(row, problem)) return {};
  Shape shape = alike(problem, *row.kernel);
  // A row may want more of its sizes than its edges say: then the problem itself is run.
  if (!supports(row, shape)) shape = shape_of(problem);
  const Digest key = key_of(row, config, shape);
  State& own = state();
  {
    const std::lock_guard lock(own.mutex);
    if (auto it = own.here.find(key); it != own.here.end()) return it->second;
    const std::optional<std::string> known = own.verdicts.find(key);
    const bool counts = known && (settings_.mode != Mode::kAlways || !known->empty());
    if (counts || settings_.mode == Mode::kOff) {
      ++own.report.remembered;
      const std::string why = known.value_or(std::string());
      if (!why.empty()) own.report.refused.push_back(why);
      return own.here[key] = why;
    }
  }
  const auto start = Clock::now();
  std::string why;
  try {
    const std::unique_ptr<Place> place = settings_.place(row);
    why = check_row(row, config, shape, place.get());
  } catch (const Error& error) {
    return std::string("it could not be checked: ") + error.what();  // no fault: not remembered
  }
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  const select::Problem checked(shape.op, shape.inputs, shape.outputs, shape.attrs);
  if (!why.empty()) {
    why = row.backend + "/" + std::string(row.name()) + " failed its self-check on " + checked.str() + ": " + why;
  }
  log_debug(LogTopic::kSelect, [&] {
    return "self-check of " + std::string(row.name()) + " on " + checked.str() + " for " + problem.str() +
           (why.empty() ? ": passed, " : ": refused, ") + std::to_string(ms) + " ms";
  });
  const std::lock_guard lock(own.mutex);
  ++own.report.checked;
  own.report.milliseconds += ms;
  if (auto it = own.here.find(key); it != own.here.end()) return it->second;  // another thread
  if (!why.empty()) {
    own.report.refused.push_back(why);
    log_error(LogTopic::kSelect, "RM510 " + why + "; it is not used on this machine");
  }
  own.verdicts.add(key, why);
  return own.here[key] = why;
}

Report SelfCheck::report() const {
  State& own = state();
  const std::lock_guard lock(own.mutex);
  return own.report;
}

const std::string& processor_name() {
  static const std::string name = [] {
    std::ifstream file("/proc/cpuinfo");
    std::string line, out;
    while (std::getline(file, line) && !line.empty()) {  // of the first core
      for (const char* field : {"vendor_id", "cpu family", "model", "model name", "stepping",
                                "CPU implementer", "CPU part", "CPU variant", "CPU revision"}) {
        const std::string wanted = field;
        if (line.compare(0, wanted.size(), wanted) != 0) continue;
        const char behind = line.size() > wanted.size() ? line[wanted.size()] : ' ';
        if (behind == '\t' || behind == ':') out += line.substr(line.find(':') + 1) + ";";
      }
    }
    return out;
  }();
  return name;
}

}  // namespace rm::selfcheck
