#!/usr/bin/env bash
# From a fresh Debian or Ubuntu machine to the main job: sets up .venv, builds rm_abstract, then runs two
# ordinary scripts as they are and compiled (first without, then with a warm cache) and compares.
# May be run again at any time; PYTHON=python3.12 chooses another interpreter.
set -euo pipefail

# shellcheck source=examples/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_environment examples

RUNS="$ROOT/build/quickstart"
rm -rf "$RUNS"
mkdir -p "$RUNS"
export RM_CACHE_DIR="$RUNS/cache" # of its own, so that the first compiled run is always a cold one

# run NAME COMMAND...: runs the command with its results and its wall time kept under NAME.
run() {
  local name=$1 start
  shift
  say "$*"
  start=$(date +%s%N)
  "$@" --json "$RUNS/$name.json" 2>"$RUNS/$name.stderr" || {
    cat "$RUNS/$name.stderr" >&2
    die "the command above failed; its error output precedes this line"
  }
  echo $((($(date +%s%N) - start) / 1000000)) >"$RUNS/$name.wall_ms"
}

for script in embed_sentences generate_text; do
  run "$script.eager" "$PYTHON" "examples/$script.py"
  for cache in cold warm; do
    run "$script.$cache" "$PYTHON" -m rm_abstract --explain=json "examples/$script.py"
  done
done

say "Summary"
"$PYTHON" examples/summarise_runs.py "$RUNS"
"$VENV/bin/rm-abstract" cache stats
