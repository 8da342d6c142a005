"""What the build says where a header is missing: its name and the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NO_DOCTEST = "-DCMAKE_DISABLE_FIND_PACKAGE_doctest=ON"  # nor its CMake file
ROOT = Path(__file__).resolve().parents[2]


def headers_of(folder: Path, name: str, content: str) -> Path:
    header = folder / name
    header.parent.mkdir(parents=True)
    header.write_text(content)
    return folder


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """This interpreter without any installed package."""
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def configure(tmp_path: Path, python: Path, *options: str) -> str:
    """What CMake says when it looks neither at the system's headers nor at installed packages."""
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), *options]
    command += [f"-DPython3_EXECUTABLE={python}", "-DRM_CUDA=OFF", "-DRM_BUILD_PYTHON=OFF"]
    command += ["-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include"]
    environment = {k: v for k, v in os.environ.items() if k not in {"CMAKE_ARGS", "PYTHONPATH"}}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return f"rc={done.returncode} {' '.join((done.stdout + done.stderr).split())}"


def test_each_missing_header_is_named_with_the_command_that_installs_it(
    tmp_path: Path, bare_python: Path
) -> None:
    said = configure(tmp_path, bare_python)
    assert said.startswith("rc=1") and "pip install 'apache-tvm-ffi>=0.1.2'" in said, said
    old = "#define DLPACK_MAJOR_VERSION 1\n#define DLPACK_MINOR_VERSION 0\n"
    folder = headers_of(tmp_path / "old", "dlpack/dlpack.h", old)
    said = configure(tmp_path, bare_python, f"-DRM_DLPACK_INCLUDE={folder}")
    assert said.startswith("rc=1") and "version 1.0)" in said, said
    recent = old.replace("MINOR_VERSION 0", "MINOR_VERSION 3")
    folder = headers_of(tmp_path / "recent", "dlpack/dlpack.h", recent)
    given = [f"-DRM_DLPACK_INCLUDE={folder}"]
    said = configure(tmp_path, bare_python, *given)
    assert said.startswith("rc=1") and "pip install nlohmann-json" in said, said
    folder = headers_of(tmp_path / "json", "nlohmann/json.hpp", "#pragma once\n")
    given += [f"-DRM_JSON_INCLUDE={folder}"]
    said = configure(tmp_path, bare_python, *given)
    assert said.startswith("rc=1") and "pip install onednn-devel-cpu-gomp" in said, said
    folder = headers_of(tmp_path / "onednn", "oneapi/dnnl/dnnl.h", "#pragma once\n")
    given += [f"-DRM_ONEDNN_INCLUDE={folder}"]
    said = configure(tmp_path, bare_python, *given, "-DRM_BUILD_TESTS=ON", NO_DOCTEST)
    assert said.startswith("rc=1") and "pip install pgm-build-deps" in said, said
    said = configure(tmp_path, bare_python, *given, "-DRM_BUILD_TESTS=OFF")
    assert said.startswith("rc=0"), said


def test_the_headers_that_torch_ships_serve_where_no_others_are(tmp_path: Path) -> None:
    """A package folder with torch's headers alone, no package of headers."""
    torch = pytest.importorskip("torch")
    packages = tmp_path / "packages"
    include = packages / "torch" / "include" / "ATen"
    include.mkdir(parents=True)
    (packages / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    source = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"
    (include / "dlpack.h").write_text(source.read_text())
    headers_of(include.parent, "oneapi/dnnl/dnnl.h", "#pragma once\n")
    wrapper = tmp_path / "python3"
    wrapper.write_text(
        f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n',
    )
    wrapper.chmod(0o755)
    folder = headers_of(tmp_path / "json", "nlohmann/json.hpp", "#pragma once\n")
    said = configure(tmp_path, wrapper, f"-DRM_JSON_INCLUDE={folder}")
    assert said.startswith("rc=0"), said
    made = tmp_path / "build" / "dlpack_of_torch" / "dlpack" / "dlpack.h"
    assert made.read_text() == source.read_text()
