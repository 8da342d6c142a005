#!/usr/bin/env bash
# Sets up everything (as examples/quickstart.sh does, with the test requirements) and runs all tests: C++
# (ctest), the repository checks, ruff, mypy, Python (pytest; its summary comes last).
# RM_HEAVY=1 adds the kernel tests on every instruction set of the machine, and the C++ suite and a part of the
# Python tests under the sanitizers.
# Extra arguments go to pytest.
set -euo pipefail

# shellcheck source=examples/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
setup_environment test

RM_TEST_HOME="$(mktemp -d)" # no test may read or write the user's own cache
trap 'rm -rf "$RM_TEST_HOME"' EXIT
export RM_CACHE_DIR="$RM_TEST_HOME/cache"
# What random tests draw follows from the sources: a tree that passed here draws the same in CI. A changed
# tree draws anew, and so does a run of pytest alone; RM_SEED=n repeats one.
sources() { find include src python backends tests -type f ! -path '*/__pycache__/*' -print0; }
RM_SEED="${RM_SEED:-$((0x$(sources | LC_ALL=C sort -z | xargs -0 cat | sha256sum | cut -c1-7)))}"
export RM_SEED
failures=()

# step NAME COMMAND...: runs it, remembers a failure and goes on.
step() {
  local name=$1 started=$SECONDS
  shift
  say "$name: $*"
  "$@" || failures+=("$name")
  echo "($name: $((SECONDS - started)) s)"
}

# sanitized NAME SANITIZERS CTEST_ARGUMENT...: builds the C++ tests with sanitizers and runs those that ctest's
# arguments select.
# Nothing but the tests is built: a sanitized extension cannot be loaded into a plain interpreter.
sanitized() {
  local folder="build/$1" sanitizers=$2
  local configure=(cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo
    -DRM_BUILD_TESTS=ON -DRM_BUILD_PYTHON=OFF "-DRM_SANITIZE=$sanitizers" "-DPython3_EXECUTABLE=$PYTHON")
  if ! { "${configure[@]}" && cmake --build "$folder"; } >"$folder.log" 2>&1; then
    tail -n 40 "$folder.log"
    return 1
  fi
  # libgomp is not instrumented: its barriers are invisible and look like races. One thread a team.
  local threads
  threads=$([[ $sanitizers == thread ]] && echo 1 || nproc)
  # GCC aligns the fake stacks of this option to 32 bytes: stores of AVX-512's vectors would fault there.
  OMP_NUM_THREADS=$threads ASAN_OPTIONS=detect_stack_use_after_return=0 ctest --test-dir "$folder" --output-on-failure --no-tests=error "${@:3}"
}

# sanitized_python NAME LIBRARIES TESTS...: the extension and all plugins with a sanitizer, under the plain
# interpreter: the sanitizer's run-time libraries come first. Leaks are not looked for, the interpreter itself
# has some; of races, those of code that was built so.
sanitized_python() {
  local folder="build/$1" package="$RM_TEST_HOME/$1" libraries=$2
  if ! { cmake -S . -B "$folder" -DRM_BUILD_PYTHON=ON "-DPython_EXECUTABLE=$PYTHON" &&
    cmake --build "$folder"; } >"$folder.python.log" 2>&1; then
    tail -n 40 "$folder.python.log"
    return 1
  fi
  cp -r python "$package"
  cp "$folder"/src/bindings/_core*.so "$package/rm_abstract/"
  mkdir -p "$package/rm_abstract/backends"
  cp "$folder"/backends/*/rm_backend_*.so "$package/rm_abstract/backends/"
  local threads
  threads=$([[ $1 == tsan ]] && echo 1 || nproc)
  PYTHONPATH="$package" LD_PRELOAD="$libraries" OMP_NUM_THREADS=$threads ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 "$PYTHON" -m pytest "${@:3}"
}

"$PYTHON" -m mypy >"$RM_TEST_HOME/types.txt" 2>&1 & # one thread for a minute, beside tests that wait for workers
types=$!
report_types() {
  local result=0
  wait "$types" || result=$?
  cat "$RM_TEST_HOME/types.txt"
  return $result
}

step "C++ tests" ctest --test-dir build --output-on-failure --no-tests=error
step "Repository checks" "$PYTHON" tests/checks/run.py
step "Lint" "$PYTHON" -m ruff check .
step "Types" report_types
if [[ ${RM_HEAVY:-0} == 1 ]]; then
  step "Kernels on every instruction set" tests/cpp/run_on_machine.sh build/every_set "$RM_TEST_HOME/kernels"
  step "Address and undefined-behaviour sanitizers" sanitized asan address,undefined
  step "Python tests under the address sanitizer" sanitized_python asan \
    "$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)" -q tests/fault/test_corruption.py \
    tests/integration/test_{capture_operators,owned_weights,torch_bridge,warm_cache}.py tests/parity/test_gate.py
  # Kernels run on one thread there: their tests would take half an hour and show nothing.
  step "Thread sanitizer" sanitized tsan thread -E 'gemm|cpu_ops|selfcheck'
  step "Python tests under the thread sanitizer" sanitized_python tsan "$(g++ -print-file-name=libtsan.so)" -q \
    tests/fault/test_{concurrency,packing_stress}.py tests/integration/test_{hooks_router,owned_weights}.py \
    tests/unit/test_sharing.py
fi
# Two test processes: most of them wait for others. Threads that wait must not spin in each other's way.
export OMP_WAIT_POLICY=passive
step "Python tests" "$PYTHON" -m pytest -n 2 --dist loadfile --durations 20 "$@"

if ((${#failures[@]})); then
  printf 'FAILED: %s\n' "${failures[@]}"
  exit 1
fi
