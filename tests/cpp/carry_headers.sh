#!/usr/bin/env bash
# carry_headers.sh [--onednn]: copies the third-party headers that the C++ tests need into .carry, for a machine that has
# neither them nor a network (run_on_machine.sh finds them there). Some MB; with --onednn also oneDNN's library, 55 MB.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
carry="$root/.carry"
python="${PYTHON:-python3}"
rm -rf "$carry"

# copied NAME HEADER: the header, and what lies beside it where the folder is the header's own.
copied() {
  local name=$1 header=$2 folder
  folder="$("$python" "$root/src/cmake/find_header.py" "$header")"
  if [[ -z $folder && -f /usr/include/$header ]]; then folder=/usr/include; fi
  if [[ -z $folder ]]; then
    echo "expected $header, found none; try pip install '.[test]' in the environment of $python" >&2
    exit 1
  fi
  mkdir -p "$carry/$name"
  cp -rL "$folder/${header%%/*}" "$carry/$name/"
}
copied doctest doctest/doctest.h
copied json nlohmann/json.hpp
copied dlpack dlpack/dlpack.h
copied onednn_header oneapi/dnnl/dnnl.h

if [[ ${1:-} == --onednn ]]; then
  library="$("$python" -c 'import sys; print(sys.prefix)')/lib/libdnnl.so.3"
  mkdir -p "$carry/onednn"
  cp -L "$library" "$carry/onednn/"
fi
du -sh "$carry"
