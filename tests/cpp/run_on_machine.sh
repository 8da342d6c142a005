#!/usr/bin/env bash
# run_on_machine.sh BUILD OUT: builds the C++ tests in BUILD and runs those of the CPU kernels once for every instruction set
# of this machine. OUT/rows.tsv gets a line for each kernel row and set that ran: row, set, processor, checks, result.
# Needs g++, cmake and Python's headers; no network. Headers that the machine lacks are taken from .carry
# (tests/cpp/carry_headers.sh makes that folder on a machine that has them). `python docs/gen_kernels.py OUT/rows.tsv`
# takes the lines over into docs/kernels_run.tsv and docs/kernels.md.
set -euo pipefail

if (($# != 2)); then
  echo "usage: run_on_machine.sh BUILD OUT" >&2
  exit 2
fi
source_folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build=$1 out=$2
carry="$source_folder/.carry"
mkdir -p "$build" "$out"

# carried FOLDER FILE VARIABLE: a -D option where the header was carried here.
options=()
carried() {
  if [[ -f $carry/$1/$2 ]]; then options+=("-D$3=$carry/$1"); fi
}
carried doctest doctest/doctest.h RM_DOCTEST_INCLUDE
carried json nlohmann/json.hpp RM_JSON_INCLUDE
carried dlpack dlpack/dlpack.h RM_DLPACK_INCLUDE
carried onednn_header oneapi/dnnl/dnnl.h RM_ONEDNN_INCLUDE
# Only a library: kernels call it where it is found at run time.
if [[ -f $carry/onednn/libdnnl.so.3 ]]; then export RM_TEST_ONEDNN="$carry/onednn/libdnnl.so.3"; fi

started=$SECONDS
cmake -S "$source_folder" -B "$build" -DCMAKE_BUILD_TYPE=Release -DRM_BUILD_TESTS=ON -DRM_BUILD_PYTHON=OFF -DRM_CUDA=OFF \
  "${options[@]}" >"$out/configure.log" 2>&1 || { tail -n 30 "$out/configure.log"; exit 1; }
cmake --build "$build" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" --target cpu_kernel_tests >"$out/build.log" 2>&1 || {
  grep -A5 error "$out/build.log" | head -n 40
  exit 1
}
echo "built in $((SECONDS - started)) s"

tests=("$build/tests/cpp/selfcheck/selfcheck_test" "$build/tests/cpp/cpu_ops/cpu_ops_test"
  "$build/tests/cpp/cpu_gemm/rm_test_cpu_gemm")
failed=0
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # teams of several processes must not spin in each other's way
: >"$out/rows.tsv"
: >"$out/results.txt"
while read -r set verdict; do
  if [[ $verdict != offered ]]; then
    echo "$set: not run, this machine has no such set" | tee -a "$out/results.txt"
    continue
  fi
  for test in "${tests[@]}"; do
    name=$(basename "$test") result=passed began=$SECONDS
    RM_CPU_ISA=$set RM_TEST_ROWS="$out/rows.tsv" timeout 300 "$test" >"$out/$name.$set.log" 2>&1 || result=FAILED
    [[ $result == passed ]] || failed=1
    echo "$set: $name $result ($((SECONDS - began)) s)" | tee -a "$out/results.txt"
  done
done < <("${tests[0]}" --list-instruction-sets)
sort -u -o "$out/rows.tsv" "$out/rows.tsv"
echo "$(cut -f1 "$out/rows.tsv" | sort -u | wc -l) rows ran; $((SECONDS - started)) s in all"
exit $failed
