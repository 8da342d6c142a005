"""Tries an installed rm_abstract without torch: import, plugins, cache keys, headers, programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rm_abstract
from rm_abstract import _core

package = Path(rm_abstract.__file__).parent
assert "site-packages" in package.parts, f"expected the installed package, got {package}"

names = {row["name"] for row in rm_abstract.backends()}
# The torch plugin is listed only where torch can be imported.
assert {"cpu", "sim", "null"} <= names, names
print("plugins:", ", ".join(sorted(names)))

digest = _core.cache.KeyBuilder("program").set("program", "p").finish().hex
assert len(digest) == 64, digest

for command in (["--version"], ["--include-dir"]):
    done = subprocess.run(
        [sys.executable, "-m", "rm_abstract", *command], capture_output=True, text=True, check=True
    )
    print(*command, done.stdout.strip())
include = Path(rm_abstract.include_dir())
assert (include / "rm" / "plugin.hpp").is_file() and (include / "dlpack" / "dlpack.h").is_file()

source = "#include <rm/plugin.hpp>\n#include <rm/kernels.h>\n#include <rm/ewise.h>\n"
command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", "-x", "c++", "-"]
assert subprocess.run(command, input=source, text=True).returncode == 0
print("a plugin's headers compile")
