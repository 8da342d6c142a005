// The judge of kernel rows: the first time a machine prepares a row for a problem, the row is run
// once and compared with the operator's reference (row_check.hpp). What fails is never used there.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "select/kernel_table.hpp"
#include "select/row_judge.hpp"
#include "selfcheck/place.hpp"

namespace rm::selfcheck {

enum class Mode {
  kAuto,    // a row is checked once a machine and kind of problem
  kOff,     // nothing is checked; rows that are known to be wrong are still refused
  kAlways,  // once a process, whatever is stored
};
/// Throws rm::Error for another name than auto, off or always.
Mode mode_from(const std::string& name);

struct Settings {
  Mode mode = Mode::kAuto;
  std::string directory;  // of the verdicts; empty: they are kept in this process only
  bool writable = true;
  PlaceOf place = place_of;  // where rows of a device are run
};

struct Report {
  int64_t checked = 0, remembered = 0;  // rows run here; rows another process has run
  double milliseconds = 0;              // spent on the former
  std::vector<std::string> refused;     // a line each
};

/// Any thread; a child of fork starts with what is stored.
class SelfCheck final : public select::RowJudge {
 public:
  explicit SelfCheck(Settings settings);
  ~SelfCheck() override;
  SelfCheck(const SelfCheck&) = delete;
  SelfCheck& operator=(const SelfCheck&) = delete;

  std::string refusal(const select::Row& row, uint32_t config,
                      const select::Problem& problem) override;
  Report report() const;

 private:
  struct State;
  State& state() const;

  const Settings settings_;
  mutable std::atomic<State*> state_;
};

/// The processor's model, in one line.
const std::string& processor_name();

}  // namespace rm::selfcheck
