// Generator and Generation over the plugin's table.
#include "backend/generators.hpp"

#include <cmath>
#include <limits>
#include <utility>

#include "backend/status.hpp"
#include "base/error.hpp"

namespace rm::backend {
namespace {

std::vector<rm_option> views_of(const Options& options) {
  std::vector<rm_option> out;
  for (const auto& [key, value] : options) out.push_back({to_rm_str(key), to_rm_str(value)});
  return out;
}

const rm_generators& table_of(Backend& backend) {
  const rm_generators* table = backend.generators();
  if (table != nullptr) return *table;
  throw Error(RM_UNIMPLEMENTED,
              "[generate " + backend.name() + "] expected a plugin with rm.generate/1, got none",
              "RM304");
}

}  // namespace

Generation::Generation(const rm_generators& table, rm_generator* generator,
                       GenerateRequest request)
    : table_(table), request_(std::move(request)), sampling_(views_of(request_.sampling)) {
  for (const auto& prompt : request_.prompts) prompts_.push_back({prompt.data(), prompt.size()});
  raw_.struct_size = sizeof raw_;
  raw_.prompts = prompts_.data();
  raw_.num_prompts = prompts_.size();
  raw_.max_new_tokens = request_.max_new_tokens;
  raw_.stop_tokens = request_.stop_tokens.data();
  raw_.num_stop_tokens = request_.stop_tokens.size();
  raw_.sampling = {sampling_.data(), sampling_.size()};
  raw_.seeds = request_.seeds.empty() ? nullptr : request_.seeds.data();
  check(table_.start(generator, &raw_, &handle_), "generate: start");
}

Generation::~Generation() { table_.finish(handle_); }

Generation::Step Generation::step() {
  Step out{std::vector<int64_t>(prompts_.size(), -1),
           std::vector<double>(prompts_.size(), std::numeric_limits<double>::quiet_NaN())};
  check(table_.step(handle_, out.tokens.data(), out.log_probabilities.data()), "generate: step");
  return out;
}

Generator::Generator(Backend& backend, size_t device, const std::string& folder,
                     const Options& options)
    : table_(table_of(backend)) {
  const auto views = views_of(options);
  check(table_.open(device, to_rm_str(folder), {views.data(), views.size()}, &handle_),
        "generate: open");
}

Generator::~Generator() { table_.close(handle_); }

uint64_t Generator::max_tokens() {
  uint64_t out = 0;
  check(table_.max_tokens(handle_, &out), "generate: max_tokens");
  return out;
}

std::unique_ptr<Generation> Generator::start(GenerateRequest request) {
  return std::make_unique<Generation>(table_, handle_, std::move(request));
}

}  // namespace rm::backend
