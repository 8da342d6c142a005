"""Devices and backends as Python sees them. Plugins are found here, loaded by the core.

Search order: the package's own `backends/` folder, entry points of the group
`rm_abstract.backends` (each gives an absolute path or a plugin in Python), then RM_BACKEND_PATH.
Never the working directory.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rm_abstract.base.config import Settings
from rm_abstract.base.config import resolve as resolve_settings
from rm_abstract.base.errors import ConfigError, DeviceUnavailableError, PluginError, from_core
from rm_abstract.worker import python_plugins

ENTRY_POINTS = "rm_abstract.backends"
_LONGEST_WHY = 2000  # characters of what a plugin raised while it was imported
GPU = "rm_backend_cuda.so"  # asks the driver when it lists its devices: for who wants a GPU
BRIDGE = "rm_backend_torch.so"  # needs libtorch in the process: loaded once torch is imported

# Backends whose devices have names of kinds (cpu, gpu:0, npu:0) or are no devices of a user's.
_NAMED_BY_KIND = frozenset({"cpu", "cuda", "rbln", "furiosa", "null", "sim", "torch"})

_loading = threading.Lock()
_loaded_paths: set[str] = set()


@dataclass(frozen=True)
class Resolved:
    """The device a session uses, and why it is not a better or the requested one."""

    name: str
    backend: str
    index: int = 0
    fell_back: bool = False
    action: str = "warn"
    notes: tuple[dict[str, str], ...] = field(default=())


def load_plugins(
    search_path: str = "", cpu_isa: str = "", given: str = "", gpu: bool = False
) -> None:
    """Loads every plugin once; what fails is listed by ``backends()`` with its reason. The CPU
    plugin keeps the instruction sets it is loaded with: ``cpu_isa``, else those of RM_CPU_ISA.
    ``given`` is a plugin's file that the caller loads next: an entry point of its name is left out.
    The plugin for NVIDIA's GPUs only with ``gpu``: it asks the driver, after which a fork cannot.
    """
    from rm_abstract import _core

    with _loading:
        for path in _package_plugins():
            if path in _loaded_paths or (path.endswith(BRIDGE) and "torch" not in sys.modules):
                continue
            if path.endswith(GPU) and not gpu:
                continue
            _loaded_paths.add(path)
            try:
                _core.backend.load_plugin(path, _plugin_options(path, cpu_isa))
            except _core.CoreError:
                continue  # the core lists it with its reason; the others still load
        if "entry points" not in _loaded_paths:
            _loaded_paths.add("entry points")
            _load_entry_points(os.pathsep.join((search_path, given)))
        searched = f"search path {search_path}"  # which may be one file, itself remembered
        if search_path and searched not in _loaded_paths:
            _loaded_paths.add(searched)
            _load_python_files(search_path)
            try:
                _core.backend.load_search_path(python_plugins.without_files(search_path))
            except _core.CoreError as error:
                raise from_core(error, ConfigError) from None


def _load_python_files(search_path: str) -> None:
    """Plugins in Python: somebody else's code, so whatever it raises is listed."""
    for path in python_plugins.files_of(search_path):
        if str(path) in _loaded_paths:
            continue
        _loaded_paths.add(str(path))
        try:
            python_plugins.register(python_plugins.read(path))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() of an SDK without a licence among them
            _list_failure(path.stem.removeprefix(python_plugins.PREFIX), str(path), error)


def _list_failure(name: str, source: str, error: BaseException) -> None:
    from rm_abstract import _core

    try:
        why = str(error) if isinstance(error, _core.CoreError) else repr(error)
    except Exception:
        why = f"an error of {type(error).__name__} that cannot be told as text"
    if len(why) > _LONGEST_WHY:
        why = f"{why[:_LONGEST_WHY]} (and {len(why) - _LONGEST_WHY} more characters)"
    reason = getattr(error, "reason", "") or "RM401"
    _core.backend.add_failure(
        name, source, reason, f"[plugin {source}] expected a backend, got: {why}"
    )


def _package_plugins() -> list[str]:
    """`backends/` beside the package's files and beside the compiled core (an editable install
    keeps the two apart)."""
    from rm_abstract import _core

    parents = [Path(__file__).resolve().parent, Path(_core.__file__).resolve().parent]
    folders = dict.fromkeys(parent / "backends" for parent in parents)
    return [str(path) for folder in folders for path in sorted(folder.glob("rm_backend_*.so"))]


def _plugin_options(path: str, cpu_isa: str) -> list[tuple[str, str]]:
    """What a plugin's initialize() is told. The CPU plugin: its instruction sets, and where oneDNN
    lies, which its wheel puts in the environment's `lib/`; without it the plugin's own kernels
    serve."""
    from rm_abstract import _core

    if not path.endswith("rm_backend_cpu.so"):
        return []
    prefixes = [Path(sys.prefix), *list(Path(_core.__file__).resolve().parents)[4:5]]
    found = [lib for p in prefixes if (lib := p / "lib" / "libdnnl.so.3").is_file()]
    sets = cpu_isa or os.environ.get("RM_CPU_ISA", "")
    options = [("cpu_isa", sets)] if sets else []
    return [*options, ("onednn_path", str(found[0]))] if found else options


def import_torch_if_installed() -> bool:
    """For commands that list everything: the bridge shows only with torch in the process."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # absent, or broken as the doctor explains
        return False
    return True


def _load_entry_points(search_path: str) -> None:
    """An entry point names a function of no arguments that returns absolute plugin paths or
    `PythonPlugin`s. It is somebody else's code: whatever it raises is listed, and the other
    plugins still load."""
    from importlib.metadata import entry_points

    from rm_abstract import _core

    for point in entry_points(group=ENTRY_POINTS):
        try:
            from rm_abstract.plugin import PythonPlugin

            for given in python_plugins.listed(point.load()()):
                if isinstance(given, PythonPlugin):
                    if python_plugins.lies_in(search_path, given.name):
                        continue
                    python_plugins.register(python_plugins.Found(given, point.value))
                    continue
                try:
                    _core.backend.load_plugin(os.fspath(given))  # type: ignore[call-overload]
                except _core.CoreError:
                    continue  # the core lists it with its reason
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            _list_failure(point.name, point.value, error)


def look_again() -> None:
    """Devices come and go while a process lives: plugins forget the ones they found. What a session
    uses stays as it is until it is made anew."""
    from rm_abstract import _core

    if _core.backend.refresh_devices():
        python_plugins.forget_fingerprints()


def _names_gpu(device: str) -> bool:
    return device.partition(":")[0] in ("gpu", "cuda")


def check(device: str) -> None:
    """Raises ConfigError unless ``device`` is a device string."""
    from rm_abstract import _core

    try:
        _core.control.parse_device(device)
    except _core.CoreError as error:
        raise from_core(error, ConfigError) from None


def require_known(settings: Settings) -> None:
    """Raises ConfigError when the settings name a device of a plugin there is not, or options of
    one."""
    from rm_abstract import _core

    name = settings.text("device")
    load_plugins(settings.text("backend_path"), settings.text("cpu_isa"), gpu=_names_gpu(name))
    try:
        if _core.control.parse_device(name)["plugin"]:
            _core.control.require_known(name)
    except _core.CoreError as error:
        source = settings.source("device")
        raise ConfigError(f"{error} from {source}; try device='auto'") from None
    _check_plugin_options(settings)


def _check_plugin_options(settings: Settings) -> None:
    """Raises ConfigError for options of a plugin there is not, or that it does not have."""
    from rm_abstract import _core

    given = settings.plugins()
    if not given:
        return
    rows = {row["name"]: row for row in _core.backend.backends()}
    for name, options in given.items():
        if name not in rows:
            raise ConfigError(
                f"[compile_options] expected an option or the name of a plugin ({', '.join(rows)}) "
                f"from {settings.source('plugin_options')}, got {name!r}; try rm-abstract backends"
            )
        devices = rows[name]["devices"]
        if not devices:
            continue  # nothing is compiled for it
        known = dict(devices[0]["properties"]).get("options", "").split()
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"[compile_options] expected options of the plugin {name} "
                    f"({', '.join(known) or 'it has none'}), got {option!r}; try without it"
                )


def resolve(settings: Settings) -> Resolved:
    """The device these settings lead to on this machine. Raises ConfigError for the name of a
    plugin there is not, DeviceUnavailableError when the fallback policy, or an index no device
    has, says so."""
    from rm_abstract import _core

    require_known(settings)
    look_again()
    try:
        found = _core.control.resolve_device(
            settings.text("device"),
            settings.text("fallback"),
            settings.flag("sim_npu"),
            settings.text("hardware_root"),
        )
    except _core.CoreError as error:
        raise from_core(error, DeviceUnavailableError) from None
    return Resolved(
        name=found["device"],
        backend=found["backend"],
        index=found["index"],
        fell_back=found["fell_back"],
        action=found["action"],
        notes=tuple(dict(note) for note in found["notes"]),
    )


def backends(search_path: str = "") -> list[dict[str, Any]]:
    """One dict a plugin, loaded or not: name, path, version, score, available, reason, devices."""
    from rm_abstract import _core

    load_plugins(search_path or os.environ.get("RM_BACKEND_PATH", ""), gpu=True)
    look_again()
    return [dict(row) for row in _core.backend.backends()]


def devices(sim_npu: bool = False) -> list[str]:
    """Usable devices, best first; ``auto`` takes the first. Those of other makers' plugins, which
    are used when they are named, follow; simulated ones come last and only when asked for."""
    from rm_abstract import _core

    load_plugins(os.environ.get("RM_BACKEND_PATH", ""), gpu=True)
    look_again()
    found = [row["device"] for row in _core.control.usable_devices(sim_npu, hardware_root())]
    for row in _core.backend.backends():
        if row["name"] not in _NAMED_BY_KIND and row["available"]:
            found += [f"{row['name']}:{i}" for i in range(len(row["devices"]))]
    for row in _core.backend.backends() if sim_npu else ():
        if row["name"] == "sim" and row["available"]:
            found += [f"sim:{i}" for i in range(len(row["devices"]))]
    return found


def hardware_root() -> str:
    """Where device nodes and PCI functions are looked for."""
    return os.environ.get("RM_HARDWARE_ROOT") or "/"


def info(device: str) -> dict[str, Any]:
    """Properties of one usable device. Raises DeviceUnavailableError when it is not there."""
    from rm_abstract import _core

    check(device)
    load_plugins(os.environ.get("RM_BACKEND_PATH", ""), gpu=_names_gpu(device))
    look_again()
    try:
        sim_npu = resolve_settings({}).flag("sim_npu")
        found = _core.control.resolve_device(device, "error", sim_npu, hardware_root())
    except _core.CoreError as error:
        raise from_core(error, DeviceUnavailableError) from None
    for row in _core.backend.backends():
        if row["name"] == found["backend"] and row["available"]:
            device_info = dict(row["devices"][found["index"]])
            device_info.update(
                device=found["device"], backend=row["name"], backend_version=row["version"]
            )
            return device_info
    raise PluginError(
        f"[device] expected backend {found['backend']} to list {found['device']}, got nothing; "
        "try rm-abstract doctor"
    )
