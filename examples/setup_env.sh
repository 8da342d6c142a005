# shellcheck shell=bash
# Shared by examples/quickstart.sh and tests/run.sh: system packages, the virtual environment .venv and
# the build. Sourced, never run; expects `set -euo pipefail`. Every step is skipped when already done.
# PYTHON chooses the interpreter (default python3); a torch that it can import is used as it is.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
TORCH_VERSION=2.13.0 # installed only where no torch >= 2.10 is importable
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PIP_DISABLE_PIP_VERSION_CHECK=1
export SKBUILD_BUILD_DIR=build # one incremental build folder for the package and the C++ tests

say() { printf '\n==> %s\n' "$*"; }
die() {
  printf '\nerror: %s\n' "$*" >&2
  exit 1
}

# ---- System packages -------------------------------------------------------------------------------

has_header() { printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
has_python_header() {
  "$PYTHON" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

# Prints the Debian packages whose content is missing; content is probed, so other systems work too.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  command -v "$PYTHON" >/dev/null || echo python3
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  has_python_header 2>/dev/null || echo python3-dev
  if [[ $1 == "test" ]]; then has_header doctest/doctest.h || echo doctest-dev; fi
}

# apt_install PACKAGE...: as root, else through sudo, which may ask for a password only on a terminal.
apt_install() {
  local prefix=()
  command -v apt-get >/dev/null ||
    die "missing: $*; there is no apt-get here: install what these Debian packages hold, then run again"
  if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
      die "missing: $*; run as root: apt-get install $*"
    fi
    prefix=(sudo)
  fi
  prefix+=(env DEBIAN_FRONTEND=noninteractive apt-get)
  say "Installing system packages: $*"
  if [[ -z ${APT_UPDATED:-} ]]; then
    "${prefix[@]}" update -qq || echo "apt-get update failed; trying with the lists that are here"
    APT_UPDATED=1
  fi
  "${prefix[@]}" install -y -qq --no-install-recommends "$@"
}

install_system_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$1")
  # doctest is probed with g++: look again once the compiler is there.
  if [[ " ${missing[*]} " == *" g++ "* || " ${missing[*]} " == *" python3 "* ]]; then
    apt_install g++ python3 python3-dev python3-venv || die "g++ and python3 could not be installed"
    mapfile -t missing < <(missing_packages "$1")
  fi
  if ((${#missing[@]})); then
    apt_install "${missing[@]}" || die "could not install: ${missing[*]}; run: apt-get install ${missing[*]}"
    mapfile -t missing < <(missing_packages "$1")
  fi
  ((${#missing[@]} == 0)) || die "still missing after the installation: ${missing[*]}"
  say "System packages: all present ($(g++ --version | head -1))"
}

# ---- Virtual environment ---------------------------------------------------------------------------

torch_version() { "$1" -c 'import torch; print(torch.__version__)' 2>/dev/null || true; }

# Whether version $1 is at least 2.10; a suffix such as +cpu does not count.
torch_is_recent() {
  local major minor
  IFS=. read -r major minor _ <<<"$1"
  [[ $major =~ ^[0-9]+$ && $minor =~ ^[0-9]+$ ]] && ((major > 2 || (major == 2 && minor >= 10)))
}

make_venv() {
  local found options=()
  if [[ ! -x $VENV/bin/python ]]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      die "Python >= 3.10 is needed, $PYTHON is $("$PYTHON" -V); choose another: PYTHON=python3.12 bash $0"
    found=$(torch_version "$PYTHON")
    if torch_is_recent "$found"; then options=(--system-site-packages); fi
    say "Making $VENV with $("$PYTHON" -V) (torch: ${found:-none})"
    "$PYTHON" -m venv "${options[@]}" "$VENV"
    if [[ -n ${options[*]} ]]; then
      # The packages of a virtual environment (PYTHON may be in one) are not the system's: name their folder.
      "$PYTHON" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix: print(sysconfig.get_path("purelib"))' \
        >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
    fi
  else
    say "Virtual environment: $VENV is present"
  fi
  PYTHON="$VENV/bin/python"
}

# The names under build-system.requires of pyproject.toml, one a line.
build_requirements() {
  "$PYTHON" - "$ROOT/pyproject.toml" <<'PY'
import sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))
PY
}

install_torch() {
  local found
  found=$(torch_version "$PYTHON")
  if ! torch_is_recent "$found"; then
    say "Installing torch $TORCH_VERSION (found: ${found:-none}; this can take minutes)"
    "$PYTHON" -m pip install -q "torch==$TORCH_VERSION"
    found=$(torch_version "$PYTHON")
    [[ -n $found ]] || die "torch was installed but cannot be imported: $("$PYTHON" -c 'import torch' 2>&1 | tail -1)"
  fi
  # Whatever is installed next must not replace this torch.
  echo "torch==$found" >"$VENV/constraints.txt"
  say "torch $found"
}

# ---- Build -----------------------------------------------------------------------------------------

# build_and_install EXTRA: the package, with that extra of pyproject.toml, into .venv. CMAKE_ARGS may add options.
build_and_install() {
  local extra=$1 requirements
  mapfile -t requirements < <(build_requirements)
  say "Build requirements: ${requirements[*]}"
  "$PYTHON" -m pip install -q -c "$VENV/constraints.txt" "${requirements[@]}"
  export PATH="$VENV/bin:$PATH" # cmake and ninja
  export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
  say "Building and installing rm_abstract[$extra] (the first build takes minutes)"
  "$PYTHON" -m pip install -q --no-build-isolation -c "$VENV/constraints.txt" "${ROOT}[$extra]"
}

# A driver's device, or Windows' one in its Linux subsystem.
has_nvidia_gpu() { [[ -e /dev/nvidiactl || -e /dev/dxg ]] || command -v nvidia-smi >/dev/null; }

# setup_environment EXTRA, which is `examples` or `test`; afterwards PYTHON is .venv's.
setup_environment() {
  cd "$ROOT" || die "cannot enter $ROOT"
  PYTHON="${PYTHON:-python3}"
  install_system_packages "$1"
  make_venv
  install_torch
  # Both are said each time: the build folder remembers what the other script chose.
  local tests=OFF cuda=AUTO
  if [[ $1 == "test" ]]; then
    tests=ON # which compile the CUDA part wherever nvcc is
  elif ! has_nvidia_gpu; then
    cuda=OFF
    say "No NVIDIA GPU: its part is left out (CMAKE_ARGS=-DRM_CUDA=ON builds it all the same)"
  fi
  export CMAKE_ARGS="-DRM_CUDA=$cuda ${CMAKE_ARGS:-} -DRM_BUILD_TESTS=$tests"
  build_and_install "$1"
}
