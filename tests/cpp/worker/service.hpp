// A service for tests: the "artefact" says what running it does.
#pragma once

#include "worker/server.hpp"

namespace rm::test {

/// Artefacts: "copy" (outputs are the inputs), "sum" (a state sums the inputs up, and is the
/// output), "crash", "exit", "hang", "error", "scribble". Programs: "slow <seconds>", "crash",
/// "deaf <seconds>" (does not listen), else echoed back.
void serve_for_tests(int descriptor);

}  // namespace rm::test
