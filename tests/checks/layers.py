"""The dependency rule of docs/architecture.md: who may include whom.

A layer is a folder of src/. It may include itself and the layers that its CMakeLists.txt names
under DEPS; the sets are read from those files, so the rule and the build cannot differ. Nothing
under src/ includes torch, only layers made by rm_add_python_layer include CPython's headers, and a
plugin under backends/ sees its own folder and include/rm/ only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = {".cpp", ".hpp", ".h", ".c", ".cu", ".inc", ".def"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
LAYER = re.compile(r"\brm_add_(python_)?layer\(\s*(\w+)\b([^)]*)\)")
KEYWORDS = {"SOURCES", "DEPS", "LIBS"}
TOP = "bindings"  # the module itself: linked from every layer, included by none
DOC = "docs/architecture.md"
DOC_ROW = re.compile(r"^\| `src/(\w+)/` \|([^|]*)\|", re.MULTILINE)


@dataclass(frozen=True)
class Layer:
    deps: frozenset[str]
    python: bool  # may call CPython's C API


def read_layers(root: Path) -> dict[str, Layer]:
    """Every layer of root/src with the set its CMakeLists.txt declares."""
    found: dict[str, Layer] = {}
    for path in sorted(root.glob("src/*/CMakeLists.txt")):
        text = re.sub(r"#.*", "", path.read_text())
        for python, name, arguments in LAYER.findall(text):
            deps: set[str] = set()
            keyword = ""
            for word in arguments.split():
                keyword = word if word in KEYWORDS else keyword
                if keyword == "DEPS" and word != "DEPS":
                    deps.add(word)
            found[name] = Layer(frozenset(deps), bool(python))
    found[TOP] = Layer(frozenset(found), True)
    return found


def circle(layers: dict[str, Layer]) -> list[str] | None:
    """Names along one circle of the sets, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in layers:
            return None
        for dep in sorted(layers[name].deps):
            if loop := visit(dep, [*path, name]):
                return loop
        done.add(name)
        return None

    return next((loop for name in sorted(layers) if (loop := visit(name, []))), None)


def violation(
    root: Path, layers: dict[str, Layer], parts: tuple[str, ...], include: str
) -> str | None:
    """Why the file at `parts` may not include `include`, or None."""
    first = include.split("/")[0]
    if first in {"torch", "ATen", "c10"}:
        return "torch stays outside: tensors cross by DLPack, ATen operators by backends/torch"
    owner = layers.get(parts[1]) if parts[0] == "src" else None
    if owner is not None and not owner.python and first in {"Python.h", "pybind11"}:
        return f"layer {parts[1]} is no rm_add_python_layer: it may not know CPython"
    if first not in layers:
        return None
    if owner is not None and first != parts[1] and first not in owner.deps:
        return f"layer {parts[1]} may not know layer {first}: DEPS in its CMakeLists.txt lacks it"
    if parts[0] == "backends" and not (root.joinpath(*parts[:2]) / include).is_file():
        return f"a plugin sees include/rm/ only, not src/{first}"
    if parts[0] == "include":
        return f"the public headers stand alone, without src/{first}"
    return None


def wrong_sets(layers: dict[str, Layer], used: dict[str, set[str]]) -> Iterator[str]:
    """Sets that name an unknown layer, name one that is not included, or form a circle."""
    for name, layer in layers.items():
        here = f"src/{name}/CMakeLists.txt"
        for dep in sorted(layer.deps - set(layers)):
            yield f"{here}: DEPS names {dep}, which is no layer"
        if name != TOP:
            for dep in sorted((layer.deps & set(layers)) - used.get(name, set())):
                yield f"{here}: DEPS names {dep}, but no file of {name} includes it"
    if loop := circle(layers):
        yield f"src: the layers form a circle: {' -> '.join(loop)}"


def wrong_page(root: Path, layers: dict[str, Layer]) -> Iterator[str]:
    """Rows of the page's table that differ from the sets."""
    page = root / DOC
    if not page.is_file():
        return
    rows = {name: set(re.findall(r"\w+", cell)) for name, cell in DOC_ROW.findall(page.read_text())}
    for name, layer in layers.items():
        wanted = {"all"} if name == TOP else set(layer.deps)
        if rows.get(name) != wanted:
            yield f"{DOC}: the row of src/{name}/ should list: {', '.join(sorted(wanted))}"
    for name in sorted(set(rows) - set(layers)):
        yield f"{DOC}: has a row for src/{name}/, which is no layer"


def check(root: Path, files: list[Path]) -> Iterator[str]:
    layers = read_layers(root)
    used: dict[str, set[str]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        if parts[0] not in {"src", "backends", "include"} or path.suffix not in SOURCES:
            continue
        for include in INCLUDE.findall(path.read_text()):
            if parts[0] == "src":
                used.setdefault(parts[1], set()).add(include.split("/")[0])
            if reason := violation(root, layers, parts, include):
                yield f"{path.relative_to(root)}: includes {include}: {reason}"
    yield from wrong_sets(layers, used)
    yield from wrong_page(root, layers)
