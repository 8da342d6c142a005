// A plugin's extension rm.generate/1 as objects that own what they name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "rm/generate.h"

namespace rm::backend {

/// What a generation starts from; rm_generate_request with storage of its own.
struct GenerateRequest {
  std::vector<std::vector<int64_t>> prompts;
  uint64_t max_new_tokens = 0;
  std::vector<int64_t> stop_tokens;
  Options sampling;
  std::vector<uint64_t> seeds;  ///< empty, or one a row
};

/// A batch under way. Ends with the object.
class Generation {
 public:
  /// Throws the plugin's error.
  Generation(const rm_generators& table, rm_generator* generator, GenerateRequest request);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  struct Step {
    std::vector<int64_t> tokens;
    std::vector<double> log_probabilities;  ///< NaN where the plugin knows none
  };
  Step step();

 private:
  const rm_generators& table_;
  const GenerateRequest request_;
  std::vector<rm_prompt> prompts_;
  std::vector<rm_option> sampling_;
  rm_generate_request raw_{};
  rm_generation* handle_ = nullptr;
};

/// A model loaded by the plugin's runtime. One thread at a time.
class Generator {
 public:
  /// Throws RM304 for a backend without the extension, else the plugin's error.
  Generator(Backend& backend, size_t device, const std::string& folder, const Options& options);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  uint64_t max_tokens();
  /// Must not outlive this object.
  std::unique_ptr<Generation> start(GenerateRequest request);

 private:
  const rm_generators& table_;
  rm_generator* handle_ = nullptr;
};

}  // namespace rm::backend
