"""The dependency rule of the Python package (docs/architecture.md): who may import whom.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as the
full name of a module in a string (what importlib is given). A module may import its own layer and
those before it, and no two modules may import each other, not even through others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = "rm_abstract"
FOLDER = "python"
# From left to right; each name is a module or a package below rm_abstract, the longest one counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base", "plugin", "ops", "_version"),
    ("worker",),
    ("vendors",),
    ("device",),
    ("kv",),
    ("calls",),
    ("guards",),
    ("capture",),
    ("verification",),
    ("engines",),
    ("generation",),
    ("hooks",),
    ("session",),
    ("report", "report_page", "profiling"),
    ("training",),
    ("framework",),
    ("functional", "optim"),
    ("nn",),
    ("api", "executable", "onnx_file", "onnx", "quality", "ahead", "cache", "memory", "doors"),
    ("",),  # the package itself: the public names
    ("server",),
    (
        "cli",
        "bench",
        "testing",
        "pytest_plugin",
        "__main__",
        "worker.__main__",
        "engines.capturing.__main__",
    ),  # programs
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
COMPILED = (f"{PACKAGE}._core", f"{PACKAGE}.ops._ops_")  # no Python source: anybody may import them

Imports = dict[str, list[tuple[str, int]]]  # module -> (imported module, line)


def layer_of(module: str) -> str | None:
    """The row's name that a module falls under; None when the table lacks it."""
    inner = module.removeprefix(PACKAGE).removeprefix(".")
    while inner and inner not in RANK:
        inner = inner.rpartition(".")[0]
        if not inner:
            return None
    return inner


def name_of(path: Path) -> str:
    """The dotted name of the module at this path below FOLDER."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of the package in one file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: None if path.name == "__init__.py" else -1]
                outer = package[: len(package) - node.level + 1]
                base = ".".join([*outer, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                inner = full in modules or full.startswith(COMPILED)
                yield (full if inner else base), node.lineno
        elif isinstance(node, ast.Constant) and node.value in modules and node.value != PACKAGE:
            yield node.value, node.lineno


def read_imports(root: Path, files: Iterable[Path]) -> tuple[dict[str, Path], Imports]:
    """The package's modules, and what each imports of the others."""
    modules = {}
    for path in files:
        parts = path.relative_to(root).parts
        if parts[:2] == (FOLDER, PACKAGE) and path.suffix == ".py":
            modules[name_of(path.relative_to(root / FOLDER))] = path
    found: Imports = {}
    for name, path in modules.items():
        inside = (row for row in imports_of(name, path, modules) if row[0] in modules)
        found[name] = [row for row in inside if row[0] != name]
    return modules, found


def circles(imports: Imports) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other, _ in imports[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in imports:
        if module not in order:
            visit(module)
    return found


def check(root: Path, files: list[Path]) -> Iterator[str]:
    modules, imports = read_imports(root, files)
    for module, path in modules.items():
        where, layer = path.relative_to(root), layer_of(module)
        if layer is None:
            yield f"{where}: in no layer; add it to LAYERS of tests/checks/python_layers.py"
            continue
        for other, line in imports[module]:
            known = layer_of(other)
            if known is not None and RANK[known] > RANK[layer]:
                yield f"{where}:{line}: imports {other}: layer {layer} may not know layer {known}"
    for group in circles(imports):
        yield f"modules that import each other: {', '.join(group)}"
