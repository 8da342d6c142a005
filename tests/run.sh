#!/usr/bin/env bash
# Sets up everything (as examples/quickstart.sh does, with the test requirements) and runs all tests: C++
# (ctest), the repository checks, Python (pytest; its summary comes last).
# RM_HEAVY=1 adds the thread sanitizer and the whole C++ suite under the address sanitizer.
# Extra arguments go to pytest.
set -euo pipefail

# shellcheck source=examples/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
setup_environment test

RM_TEST_HOME="$(mktemp -d)" # no test may read or write the user's own cache
trap 'rm -rf "$RM_TEST_HOME"' EXIT
export RM_CACHE_DIR="$RM_TEST_HOME/cache"
failures=()

# step NAME COMMAND...: runs it, remembers a failure and goes on.
step() {
  local name=$1 started=$SECONDS
  shift
  say "$name: $*"
  "$@" || failures+=("$name")
  echo "($name: $((SECONDS - started)) s)"
}

# sanitized NAME SANITIZERS PATTERN: builds the C++ tests with sanitizers and runs those that match.
# Nothing but the tests is built: a sanitized extension cannot be loaded into a plain interpreter.
sanitized() {
  local folder="build/$1"
  local configure=(cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo
    -DRM_BUILD_TESTS=ON -DRM_BUILD_PYTHON=OFF "-DRM_SANITIZE=$2" "-DPython3_EXECUTABLE=$PYTHON")
  if ! { "${configure[@]}" && cmake --build "$folder"; } >"$folder.log" 2>&1; then
    tail -n 40 "$folder.log"
    return 1
  fi
  ctest --test-dir "$folder" --output-on-failure --no-tests=error -R "$3"
}

step "C++ tests" ctest --test-dir build --output-on-failure --no-tests=error
step "Repository checks" "$PYTHON" tests/checks/run.py
if [[ ${RM_HEAVY:-0} == 1 ]]; then
  step "Address and undefined-behaviour sanitizers" sanitized asan address,undefined .
  step "Thread sanitizer" sanitized tsan thread .
fi
step "Python tests" "$PYTHON" -m pytest "$@"

if ((${#failures[@]})); then
  printf 'FAILED: %s\n' "${failures[@]}"
  exit 1
fi
