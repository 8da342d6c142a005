"""The repository checks find what they are for, and nothing in the repository as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import layers
import names
import pages
import python_layers
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


ROOT = Path(__file__).resolve().parents[2]


def with_layers(root: Path, **deps: str) -> None:
    """A source tree whose layers declare these sets."""
    for name, used in deps.items():
        write(
            root, f"src/{name}/CMakeLists.txt", f"rm_add_layer({name} SOURCES a.cpp\n DEPS {used})"
        )


def findings_of(root: Path, name: str, include: str) -> list[str]:
    """What the real sets of this repository say of one include, in a tree without other files."""
    reason = layers.violation(root, layers.read_layers(ROOT), Path(name).parts, include)
    return [reason] if reason else []


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("src/ir/a.hpp", "passes/pass.hpp"),
        ("src/ir/a.hpp", "worker/wire.hpp"),
        ("src/select/a.cpp", "cache/key.hpp"),
        ("src/select/a.cpp", "plan/plan.hpp"),
        ("src/runtime/a.cpp", "passes/pass.hpp"),
        ("src/partition/a.cpp", "passes/pass.hpp"),
        ("src/cache/a.cpp", "ir/graph.hpp"),
        ("src/engine/a.cpp", "generation/greedy_loop.hpp"),
        ("src/engine/a.cpp", "bindings/bind.hpp"),
        ("src/engine/a.cpp", "Python.h"),
        ("src/engine/a.cpp", "pybind11/pybind11.h"),
        ("src/ops/a.cpp", "torch/torch.h"),
        ("backends/cpu/a.cpp", "ir/graph.hpp"),
        ("include/rm/a.h", "base/error.hpp"),
    ],
)
def test_an_include_against_the_dependency_rule_is_found(
    tmp_path: Path, name: str, include: str
) -> None:
    assert len(findings_of(tmp_path, name, include)) == 1


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("src/ir/a.hpp", "base/error.hpp"),
        ("src/ir/a.hpp", "ir/graph.hpp"),
        ("src/passes/a.cpp", "ops/op.hpp"),
        ("src/router/a.cpp", "Python.h"),
        ("src/bindings/a.cpp", "generation/greedy_loop.hpp"),
        ("backends/cpu/a.cpp", "rm/backend.h"),
    ],
)
def test_an_include_along_the_dependency_rule_passes(
    tmp_path: Path, name: str, include: str
) -> None:
    assert findings_of(tmp_path, name, include) == []


def test_a_forbidden_include_in_a_file_fails_the_check_with_both_layers(tmp_path: Path) -> None:
    with_layers(tmp_path, base="", ir="base")
    files = write(tmp_path, "src/ir/a.cpp", '#include "base/error.hpp"\n')
    assert list(layers.check(tmp_path, files)) == []
    files += write(tmp_path, "src/base/a.cpp", "#pragma once\n#  include <ir/graph.hpp>\n")
    (finding,) = layers.check(tmp_path, files)
    assert finding.startswith(
        "src/base/a.cpp: includes ir/graph.hpp: layer base may not know layer ir"
    )


def test_a_set_with_an_unused_an_unknown_or_a_circular_layer_is_found(tmp_path: Path) -> None:
    with_layers(tmp_path, base="", ir="base")
    assert "DEPS names base, but no file of ir includes it" in next(layers.check(tmp_path, []))
    with_layers(tmp_path, ir="bass")
    assert "DEPS names bass, which is no layer" in next(layers.check(tmp_path, []))
    with_layers(tmp_path, base="ir", ir="base")
    files = write(tmp_path, "src/base/a.cpp", '#include "ir/b.hpp"\n')
    files += write(tmp_path, "src/ir/b.hpp", '#include "base/a.hpp"\n')
    (finding,) = layers.check(tmp_path, files)
    assert finding.endswith("circle: base -> ir -> base")


def test_a_row_of_the_architecture_page_that_differs_from_the_sets_is_found(tmp_path: Path) -> None:
    with_layers(tmp_path, base="")
    rows = "| `src/base/` | | errors |\n| `src/bindings/` | all | the module |\n"
    page = write(tmp_path, layers.DOC, rows)[0]
    assert list(layers.check(tmp_path, [])) == []
    page.write_text(rows.replace("`src/base/` | |", "`src/base/` | ir |"))
    assert "row of src/base/" in next(layers.check(tmp_path, []))


def test_a_plugin_may_name_a_folder_of_its_own_like_a_layer(tmp_path: Path) -> None:
    write(tmp_path, "backends/cpu/ops/all_rows.hpp", "#pragma once\n")
    files = write(tmp_path, "backends/cpu/plugin.cpp", '#include "ops/all_rows.hpp"\n')
    assert list(layers.check(tmp_path, files)) == []


def package(root: Path, **sources: str) -> list[Path]:
    """A package of these modules; "a__b" is rm_abstract/a/b.py."""
    return [
        path
        for name, source in sources.items()
        for path in write(root, f"python/rm_abstract/{name.replace('__', '/')}.py", source)
    ]


UPWARDS = {
    "at the top": "from rm_abstract.session import Session\n",
    "of a module by its package": "from rm_abstract import session\n",
    "by a plain import": "import rm_abstract.session\n",
    "inside a function": "def f():\n    from rm_abstract.session import Session\n",
    "for types only": "if TYPE_CHECKING:\n    from rm_abstract.session import Session\n",
    "relative": "from ..session import Session\n",
    "by its name in a string": "import_module('rm_abstract.session')\n",
}


@pytest.mark.parametrize("source", UPWARDS.values(), ids=UPWARDS)
def test_a_python_import_against_the_layers_is_found(tmp_path: Path, source: str) -> None:
    files = package(tmp_path, session="class Session: ...\n", engines__native=source)
    (finding,) = python_layers.check(tmp_path, files)
    assert "native.py" in finding
    assert "layer engines may not know layer session" in finding


def test_a_python_import_along_the_layers_passes(tmp_path: Path) -> None:
    source = "import torch\nfrom rm_abstract import _core\nfrom rm_abstract.engines import native\n"
    files = package(tmp_path, engines__native="from rm_abstract.kv import a\n", session=source)
    files += package(tmp_path, kv__a="import rm_abstract.base.errors\n", base__errors="")
    assert list(python_layers.check(tmp_path, files)) == []


def test_python_modules_that_import_each_other_through_a_third_are_found(tmp_path: Path) -> None:
    files = package(
        tmp_path,
        kv__a="from rm_abstract.kv import b\n",
        kv__b="def f():\n    from rm_abstract.kv.c import x\n",
        kv__c="if TYPE_CHECKING:\n    from rm_abstract.kv.a import y\n",
        kv__d="from rm_abstract.kv import a\n",
    )
    (finding,) = python_layers.check(tmp_path, files)
    names = ", ".join(f"rm_abstract.kv.{x}" for x in "abc")
    assert finding == f"modules that import each other: {names}"


def test_a_python_module_of_no_layer_is_found(tmp_path: Path) -> None:
    (finding,) = python_layers.check(tmp_path, package(tmp_path, helpers__misc=""))
    assert "in no layer" in finding


def test_the_python_check_sees_the_imports_of_this_repository() -> None:
    """Otherwise a moved folder would make it pass by finding nothing."""
    modules, imports = python_layers.read_imports(run.ROOT, run.tracked_files(run.ROOT))
    assert len(modules) > 100
    assert "rm_abstract.session" in {name for name, _ in imports["rm_abstract.api"]}


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


def test_two_test_files_of_one_name_are_found(tmp_path: Path) -> None:
    files = write(tmp_path, "tests/a/test_x.py", "") + write(tmp_path, "tests/b/test_x.py", "")
    (finding,) = names.check(tmp_path, files)
    assert finding.startswith("tests/b/test_x.py: tests/a/test_x.py has the same name")


def test_a_page_may_only_name_files_that_exist(tmp_path: Path) -> None:
    files = write(tmp_path, "src/base/a.cpp", "")
    page = write(tmp_path, "docs/page.md", "`base/a.cpp`, `src/base/*.cpp`, [it](../src/base)\n")
    assert list(pages.check(tmp_path, files + page)) == []
    page[0].write_text("see\n`base/b.cpp` and [a link](other.md#part)\n")
    found = list(pages.check(tmp_path, files + page))
    assert len(found) == 2 and found[0].startswith("docs/page.md:2: names base/b.cpp")


def test_a_folder_at_the_top_level_needs_a_place_in_the_house(tmp_path: Path) -> None:
    files = write(tmp_path, "cmake/find.cmake", "") + write(tmp_path, ".ci/run", "")
    (finding,) = pages.check(tmp_path, files)
    assert finding.startswith("cmake: the top level holds only")
