// generate.hpp -- write the extension rm.generate/1 as two C++ classes: a plugin's extension() gives
// generators<MyGenerator>() for RM_GENERATE_EXTENSION.
#pragma once

#include <memory>
#include <string_view>

#include "rm/generate.h"
#include "rm/plugin.hpp"

namespace rm::plugin {

/// A batch under way; destroyed when nobody wants more of it.
struct Generation {
  virtual ~Generation() = default;
  /// rm_generators.step; `log_probabilities` may be NULL.
  virtual void step(int64_t* tokens, double* log_probabilities) = 0;
};

/// A model, ready to generate.
struct Generator {
  virtual ~Generator() = default;
  virtual uint64_t max_tokens() const = 0;
  virtual std::unique_ptr<Generation> start(const rm_generate_request& request) = 0;
};

/// The table for a class MyGenerator(size_t device, std::string_view folder, rm_options options).
template <class MyGenerator>
const rm_generators* generators() {
  static const rm_generators table = [] {
    rm_generators t{};
    t.struct_size = sizeof t;
    t.open = [](size_t device, rm_str folder, rm_options options, rm_generator** out) {
      return guard([&] {
        std::unique_ptr<Generator> made =
            std::make_unique<MyGenerator>(device, view(folder), options);
        detail::give(std::move(made), out);
      });
    };
    t.max_tokens = [](rm_generator* g, uint64_t* out) {
      return guard([&] { *out = detail::as<Generator>(g).max_tokens(); });
    };
    t.close = [](rm_generator* g) { detail::destroy<Generator>(g); };
    t.start = [](rm_generator* g, const rm_generate_request* r, rm_generation** out) {
      return guard([&] { detail::give(detail::as<Generator>(g).start(*r), out); });
    };
    t.step = [](rm_generation* g, int64_t* tokens, double* log_probabilities) {
      return guard([&] { detail::as<Generation>(g).step(tokens, log_probabilities); });
    };
    t.finish = [](rm_generation* g) { detail::destroy<Generation>(g); };
    return t;
  }();
  return &table;
}

}  // namespace rm::plugin
