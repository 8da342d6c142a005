"""Finds plugins written in Python and registers them with the core.

A plugin file ``rm_backend_<name>.py`` in RM_BACKEND_PATH defines ``plugin``; an entry point of
``rm_abstract.backends`` gives a `PythonPlugin`. The same search serves the worker, which then
imports the worker class; this process never does.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from rm_abstract.base.errors import DeviceUnavailableError
from rm_abstract.worker.interpreter import environment, interpreter

if TYPE_CHECKING:  # a process without a Python plugin starts faster without these
    from rm_abstract.plugin import Device, Node, PythonPlugin, TensorType
    from rm_abstract.worker import ir_text

PREFIX = "rm_backend_"
_ASKED_S = 120.0  # for the fingerprint in another interpreter


@dataclass(frozen=True)
class Found:
    """A plugin and where it came from: a file, or the name of an entry point's function."""

    plugin: PythonPlugin
    source: str
    folder: str = ""  # of a plugin file: its worker's module may lie beside it


def files_of(search_path: str) -> Iterator[Path]:
    """The plugin files of RM_BACKEND_PATH; entries that are no absolute paths are the core's to
    report."""
    for entry in search_path.split(os.pathsep):
        path = Path(entry)
        if not path.is_absolute():
            continue
        yield from (
            sorted(path.glob(f"{PREFIX}*.py"))
            if path.is_dir()
            else ([path] if path.suffix == ".py" else [])
        )


def without_files(search_path: str) -> str:
    """What of a search path the core loads."""
    return os.pathsep.join(e for e in search_path.split(os.pathsep) if not e.endswith(".py"))


def lies_in(search_path: str, name: str) -> bool:
    """Whether a file of RM_BACKEND_PATH, a library or Python, is the plugin of that name: it takes
    the place of one that an entry point, ours among them, has."""
    for entry in filter(os.path.isabs, search_path.split(os.pathsep)):
        path = Path(entry)
        found = path.glob(f"{PREFIX}{name}.*") if path.is_dir() else iter([path])
        if any(file.stem == PREFIX + name and file.suffix in (".py", ".so") for file in found):
            return True
    return False


def read(path: Path) -> Found:
    """The plugin a file defines. Whatever its code raises passes."""
    from rm_abstract.plugin import PythonPlugin

    spec = util.spec_from_file_location(f"rm_abstract_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"[plugin] expected a Python file, got {path}")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look it up
    spec.loader.exec_module(module)
    plugin = getattr(module, "plugin", None)
    if not isinstance(plugin, PythonPlugin):
        raise TypeError(f"[plugin] expected {path} to define plugin = PythonPlugin(...)")
    return Found(plugin, str(path), str(path.parent))


def register(found: Found) -> None:
    """Raises CoreError for a name that is taken."""
    from rm_abstract import _core

    _core.backend.add_python_plugin(_Hooks(found))


class _Hooks:
    """What the core asks about a plugin (src/bindings/python_plugin.hpp)."""

    def __init__(self, found: Found) -> None:
        self._found, self._plugin = found, found.plugin
        self.name, self.version = found.plugin.name, found.plugin.version
        self.path = found.source
        self.build_id = source_digest(found.source)
        self._devices: list[Device] = []

    def score(self) -> int:
        return self._plugin.score

    def devices(self) -> list[_DeviceRow]:
        self._devices = list(self._plugin.devices())
        return [_DeviceRow(device, self._plugin) for device in self._devices]

    def fingerprint(self, device: int) -> bytes:
        return fingerprint_of_worker(self._found).encode()

    def query_support(self, device: int, text: str, nodes: int) -> list[tuple[bool, str]]:
        from rm_abstract.worker import ir_text

        program = ir_text.parse(text)
        answers = [self._why_not(node, program) for node in program.nodes]
        return [(not why, why) for why in answers]

    def _why_not(self, node: ir_text.Node, program: ir_text.Program) -> str:
        why = self._plugin.why_not(node.op, [t.dtype for t in node.types])
        if not why and self._plugin.why_not_node is not None:
            why = self._plugin.why_not_node(_public_node(node, program))
        if why is not None and not isinstance(why, str):
            raise TypeError(
                f"[plugin {self.name}] expected why_not({node.op!r}, ...) to give text, "
                f"got {type(why).__name__}"
            )
        return why or ""

    def fits(self, device: int, artefact: memoryview) -> bool:
        from rm_abstract.worker import artefact_header

        header = artefact_header.read(artefact)
        if device >= len(self._devices):
            return False  # it is gone
        return header is not None and header.fits(
            self.name, self._devices[device].arch, fingerprint_of_worker(self._found)
        )


def _public_node(node: ir_text.Node, program: ir_text.Program) -> Node:
    from rm_abstract.plugin import Node, TensorType

    def public(kind: ir_text.Type) -> TensorType:
        return TensorType(kind.dtype, kind.shape)

    return Node(
        operator=node.op,
        # Sizes are text in the program, where they may be symbols: here they are numbers.
        attributes={
            name: [int(size) for size in value] if isinstance(value, tuple) else value
            for name, value in node.attrs.items()
        },
        operands=[None if at is None else public(program.types[at]) for at in node.operands],
        results=[public(kind) for kind in node.types],
    )


class _DeviceRow:
    def __init__(self, device: Device, plugin: PythonPlugin) -> None:
        self.name, self.arch, self.memory_bytes = device.name, device.arch, device.memory_bytes
        self.properties = {
            **plugin.properties,
            "static_shapes": "1",
            "worker": "1",
            "numerics": device.numerics,
            "embeds_weights": "1" if plugin.embeds_weights else "0",
            "program_format": plugin.program_format,
            "options": " ".join(plugin.options),
            "states": "1" if plugin.states else "0",
            "generates": "1" if plugin.generator else "0",
            "samples": " ".join(plugin.samples),
            "generator_packages": " ".join(plugin.generator_packages),
        }


# ---- the fingerprint ----------------------------------------------------------------------------


def source_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return hashlib.sha256(path.encode()).hexdigest()[:32]  # an entry point's function


def fingerprint(found: Found) -> str:
    """What of this interpreter's software changes an artefact. Imports nothing of the SDK."""
    from importlib import metadata

    parts = [found.plugin.name, found.plugin.version, _worker_digest(found)]
    for package in found.plugin.packages:
        try:
            parts.append(f"{package}={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package}=none")
    return ";".join([*parts, found.plugin.fingerprint()])


def _worker_digest(found: Found) -> str:
    module = found.plugin.worker.partition(":")[0]
    beside = Path(found.folder, *module.split(".")).with_suffix(".py")
    if found.folder and beside.is_file():
        return source_digest(str(beside))
    try:
        spec = util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return "no worker"
    return source_digest(spec.origin)


def fingerprint_of_worker(found: Found) -> str:
    """The fingerprint in the interpreter that will run the worker. Raises DeviceUnavailableError
    when that interpreter has no such plugin."""
    name = found.plugin.name
    python = interpreter(name)
    return fingerprint(found) if python == sys.executable else _ask(name, python)


@lru_cache
def _ask(name: str, python: str) -> str:
    import subprocess

    command = [python, "-m", "rm_abstract.worker", name, "--fingerprint"]
    pairs = (row.split("=", 1) for row in environment(name))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(pairs), timeout=_ASKED_S, check=False
        )
    except OSError as error:
        raise _unavailable(name, python, str(error)) from error
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace")[-2000:] if error.stderr else "and no output"
        raise _unavailable(name, python, f"no answer within {_ASKED_S:g} s, {said}") from error
    if done.returncode != 0:
        raise _unavailable(name, python, done.stderr.strip()[-2000:])
    return done.stdout.rstrip("\n")


def _unavailable(name: str, python: str, why: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"[worker {name}] expected {python} to have rm_abstract and this plugin, got: {why}; try "
        f"{python} -m pip install rm_abstract, and the plugin, or another RM_{name.upper()}_PYTHON",
        code="RM401",
    )


def forget_fingerprints() -> None:
    """Devices changed: a driver may have, too."""
    _ask.cache_clear()


# ---- the worker's search -------------------------------------------------------------------------


def plugin_named(name: str, search_path: str, group: str) -> Found | None:
    """The Python plugin of that name; None when a library, or nothing, has it."""
    from importlib import metadata

    from rm_abstract.plugin import PythonPlugin

    for path in files_of(search_path):
        if path.stem == PREFIX + name:
            return read(path)
    if lies_in(search_path, name):
        return None
    for point in metadata.entry_points(group=group):
        if point.name == name:
            for given in listed(point.load()()):
                if isinstance(given, PythonPlugin) and given.name == name:
                    return Found(given, point.value)
    return None


def listed(value: object) -> Sequence[object]:
    """What an entry point's function gave, which is a path, a plugin or several, as a sequence."""
    from rm_abstract.plugin import PythonPlugin

    if isinstance(value, (str, os.PathLike, PythonPlugin)):
        return [value]
    return list(value)  # type: ignore[call-overload, no-any-return]
