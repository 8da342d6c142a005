// A service for tests: the "artefact" says what running it does.
#pragma once

#include "worker/server.hpp"

namespace rm::test {

/// Artefacts: "copy" (outputs are the inputs), "sum" (a state sums the inputs up, and is the
/// output), "crash", "exit", "hang", "error", "scribble", "nap", "meet" (waits for another one to
/// run). Programs: "slow <seconds>", "crash", "deaf <seconds>" (does not listen), else echoed back.
/// `executions`: how many of them it runs at once.
void serve_for_tests(int descriptor, size_t executions);

}  // namespace rm::test
