"""The layout of every struct of the C line, frozen: offsets may only be appended to.

Three readings are compared: the table below, the compiled headers, and the ctypes mirror.  A change
that shows up here is an ABI change: bump RM_ABI_MINOR for an appended field, RM_ABI_MAJOR for more.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import subprocess
from pathlib import Path

import pytest

from rm_abstract.base.headers import include_dir
from rm_abstract.testing import abi

ROOT = Path(__file__).resolve().parents[2]
FROZEN: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "layout.json").read_text())


def compiled_layout(folder: Path) -> dict[str, dict[str, int]]:
    """Offsets as the C compiler lays them out, for the fields the mirror names."""
    lines = []
    for name, struct in abi.STRUCTS.items():
        lines.append(f'  printf("{name} sizeof %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(f'  printf("{name} {field} %zu\\n", offsetof({name}, {field}));')
    source = folder / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <rm/kernels.h>\n"
        "int main(void) {\n" + "\n".join(lines) + "\n  return 0;\n}\n"
    )
    program = folder / "layout"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            f"-I{ROOT / 'include'}",  # this tree's, whatever is installed
            f"-isystem{include_dir()}",  # DLPack's
            str(source),
            "-o",
            str(program),
        ],
        check=True,
    )
    layout: dict[str, dict[str, int]] = {}
    output = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        name, field, value = line.split()
        layout.setdefault(name, {})[field] = int(value)
    return layout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    return compiled_layout(tmp_path_factory.mktemp("layout"))


@pytest.mark.parametrize("name", sorted(abi.STRUCTS))
def test_the_compiled_layout_is_the_frozen_one(
    name: str, compiled: dict[str, dict[str, int]]
) -> None:
    assert compiled[name] == FROZEN[name]


@pytest.mark.parametrize("name", sorted(abi.STRUCTS))
def test_the_python_mirror_has_the_compiled_layout(
    name: str, compiled: dict[str, dict[str, int]]
) -> None:
    struct = abi.STRUCTS[name]
    mirror = {field: getattr(struct, field).offset for field, *_ in struct._fields_}
    assert {"sizeof": c.sizeof(struct), **mirror} == compiled[name]


def test_no_frozen_struct_was_dropped() -> None:
    assert set(FROZEN) == set(abi.STRUCTS)


def test_structs_start_with_their_size() -> None:
    without = {"rm_blob", "rm_edge"}  # values, versioned by whoever holds them
    for name in set(abi.STRUCTS) - without:
        assert FROZEN[name]["struct_size"] == 0, name


def test_the_version_of_the_header_is_the_mirrors() -> None:
    header = (ROOT / "include" / "rm" / "backend.h").read_text()
    assert f"#define RM_ABI_MAJOR {abi.ABI_MAJOR}u" in header
    assert f"#define RM_ABI_MINOR {abi.ABI_MINOR}u" in header
