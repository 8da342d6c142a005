"""The repository checks find what they are for, and nothing in the repository as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import layers
import run
import sizes
import text


def write(root: Path, name: str, content: str) -> list[Path]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return [path]


def test_the_repository_passes_its_own_checks() -> None:
    assert run.main() == 0


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("src/ir/a.hpp", "passes/pass.hpp"),
        ("src/runtime/a.cpp", "passes/pass.hpp"),
        ("src/cache/a.cpp", "ir/graph.hpp"),
        ("src/ops/a.cpp", "torch/torch.h"),
        ("backends/cpu/a.cpp", "ir/graph.hpp"),
        ("include/rm/a.h", "base/error.hpp"),
    ],
)
def test_an_include_against_the_dependency_rule_is_found(
    tmp_path: Path, name: str, include: str
) -> None:
    files = write(tmp_path, name, f"#pragma once\n#  include <{include}>\n")
    assert len(list(layers.check(tmp_path, files))) == 1


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("src/ir/a.hpp", "base/error.hpp"),
        ("src/ir/a.hpp", "ir/graph.hpp"),
        ("src/passes/a.cpp", "ops/op.hpp"),
        ("backends/cpu/a.cpp", "rm/backend.h"),
    ],
)
def test_an_include_along_the_dependency_rule_passes(
    tmp_path: Path, name: str, include: str
) -> None:
    files = write(tmp_path, name, f'#include "{include}"\n')
    assert list(layers.check(tmp_path, files)) == []


def test_a_plugin_may_name_a_folder_of_its_own_like_a_layer(tmp_path: Path) -> None:
    write(tmp_path, "backends/cpu/ops/all_rows.hpp", "#pragma once\n")
    files = write(tmp_path, "backends/cpu/plugin.cpp", '#include "ops/all_rows.hpp"\n')
    assert list(layers.check(tmp_path, files)) == []


def test_a_source_of_more_than_800_lines_is_found(tmp_path: Path) -> None:
    assert list(sizes.check(tmp_path, write(tmp_path, "a.py", "\n" * 800))) == []
    assert len(list(sizes.check(tmp_path, write(tmp_path, "b.py", "\n" * 801)))) == 1


def test_a_large_file_is_found_whatever_its_kind(tmp_path: Path) -> None:
    files = write(tmp_path, "weights.bin", "x" * (512 * 1024 + 1))
    assert len(list(sizes.check(tmp_path, files))) == 1


@pytest.mark.parametrize(
    "content",
    [
        "see /home/" + "somebody/project\n",
        "<" * 7 + " ours\n",
        "pip install --index" + "-url x\n",
        "x = 1\t\n",
        "x = 1 \n",
        "no newline",
    ],
)
def test_forbidden_text_is_found(tmp_path: Path, content: str) -> None:
    assert list(text.check(tmp_path, write(tmp_path, "a.py", content)))


def test_ordinary_text_passes(tmp_path: Path) -> None:
    content = "path = '/dev/null'  # home/work\nrule = '======='\n"
    assert list(text.check(tmp_path, write(tmp_path, "a.py", content))) == []
