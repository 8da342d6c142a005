"""The public functions. Everything heavy is imported when it is needed: `init()` imports neither
torch nor transformers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rm_abstract import config, session
from rm_abstract import device as _devices
from rm_abstract.errors import Error, RoutingWarning
from rm_abstract.hooks.scope import disabled

if TYPE_CHECKING:
    from rm_abstract.executable import Executable
    from rm_abstract.report import Report
    from rm_abstract.session import Session

__all__ = [
    "accelerate",
    "backends",
    "compile",
    "current_device",
    "devices",
    "disabled",
    "explain",
    "get_device_info",
    "init",
    "is_initialized",
    "patches",
    "shutdown",
    "switch_device",
]


def init(
    device: Any = None,
    *,
    cache_dir: Any = None,
    compile_options: dict[str, Any] | None = None,
    verbose: Any = None,
    inference_engine: str | None = None,
    engine_options: dict[str, Any] | None = None,
    fallback: str | None = None,
    verify: Any = None,
) -> Session:
    """Catches every model from here on and runs it compiled on ``device``.

    A second call with the same settings does nothing; with others it works like
    ``switch_device``. Raises ConfigError for a value that is not understood and
    DeviceUnavailableError when the device cannot be used and ``fallback`` is "error".
    """
    from rm_abstract.hooks import install

    settings = config.resolve(
        {
            "device": device,
            "cache_dir": cache_dir,
            "compile_options": compile_options,
            "verbose": verbose,
            "inference_engine": inference_engine,
            "engine_options": engine_options,
            "fallback": fallback,
            "verify": verify,
        }
    )
    config.apply_log(settings)
    with session.lock():
        active = session.current()
        if active is not None and active.owned_by_this_process:
            if not active.settings.same_as(settings):
                _change(active, settings)
            return active
        resolved = _resolve_early(settings)
        if active is not None:  # inherited by fork: its devices belong to the parent
            _close(active)
        fresh = session.Session(settings, resolved)
        if not settings.flag("disable"):
            install.install(fresh)
        session.set_current(fresh)
        return fresh


def shutdown() -> None:
    """Restores every patched attribute exactly and takes the routers out; idempotent."""
    with session.lock():
        active = session.current()
        if active is not None:
            _close(active)
            session.set_current(None)


def switch_device(device: Any) -> Session:
    """Moves the session, and every armed model with it, to another device."""
    with session.lock():
        active = _required("switch_device")
        settings = active.settings.replaced("device", config.to_text("device", device))
        if not active.settings.same_as(settings):
            _change(active, settings)
        return active


def is_initialized() -> bool:
    active = session.current()
    return active is not None and active.owned_by_this_process


def current_device() -> str:
    """The session's device, such as "cpu" or "cuda:0"."""
    return _required("current_device").device


def devices() -> list[str]:
    """Usable devices of this machine, best first."""
    active = session.current()
    return _devices.devices(active is not None and active.settings.flag("sim_npu"))


def backends() -> list[dict[str, Any]]:
    """Every backend plugin found, with version, score and, when unusable, the reason."""
    active = session.current()
    return _devices.backends(active.settings.text("backend_path") if active is not None else "")


def get_device_info(device: str | None = None) -> dict[str, Any]:
    """Name, architecture, memory and properties of a device (default: the session's)."""
    return _devices.info(current_device() if device is None else device)


def explain(model: Any = None) -> Report:
    """What ran where, why not, and what it cost; of one model or of the whole session."""
    from rm_abstract import report

    return report.build(_required("explain"), model)


def patches() -> list[dict[str, str]]:
    """Every attribute of foreign modules that is changed right now: target, before, after, why."""
    active = session.current()
    if active is None:
        return []
    listed = [patch.to_dict() for patch in active.patches]
    if active.optimizer_hook is not None:
        listed.append(
            {
                "target": "torch.optim.optimizer._global_optimizer_post_hooks",
                "before": "",
                "after": "rm_abstract.hooks.install._watch_optimizers",
                "why": "fused optimisers change weights without counting versions",
                "state": "in place",
            }
        )
    if active.watch is not None and active.watch.installed:
        listed.append(
            {
                "target": "sys.meta_path",
                "before": "",
                "after": "rm_abstract.hooks.imports.ImportWatch",
                "why": "torch and transformers are patched when they are imported",
                "state": "in place",
            }
        )
    return listed


def accelerate(module: Any, example_inputs: Any = None) -> Any:
    """Arms a module that nothing else catches, and returns it.

    ``example_inputs`` (a tuple of positional or a dict of keyword arguments) compiles it now.
    Calls must go through ``module(...)``: ``module.forward(...)`` bypasses every hook.
    """
    active = _required("accelerate")
    armed = active.arm(module, "accelerate")
    if armed is None and not active.settings.flag("disable"):
        code, why = active.skipped.get(type(module).__qualname__, ("RM104", "not an nn.Module"))
        raise Error(
            f"[accelerate] expected a module that can be armed, got {type(module).__name__}: "
            f"{why}; try the module that holds the parameters",
            code=code,
        )
    if example_inputs is not None:
        import torch

        args, kwargs = _call_of(example_inputs)
        with torch.no_grad():
            module(*args, **kwargs)
    return module


def compile(
    module: Any,
    example_inputs: Any = None,
    *,
    device: Any = None,
    options: dict[str, Any] | None = None,
) -> Executable:
    """Compiles a module by itself, without arming it. Raises CompileError instead of falling back.

    Without ``example_inputs`` compilation happens at the first call.
    """
    from rm_abstract.executable import Executable

    settings = config.resolve({"device": device, "compile_options": options, "fallback": "error"})
    executable = Executable(module, session.Session(settings, _devices.resolve(settings)))
    if example_inputs is not None:
        args, kwargs = _call_of(example_inputs)
        executable.prepare(*args, **kwargs)
    return executable


def _call_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if hasattr(example_inputs, "keys"):  # a tokenizer's BatchEncoding
        return (), dict(example_inputs)
    return (example_inputs,), {}


def _required(where: str) -> Session:
    active = session.current()
    if active is None:
        raise Error(f"[{where}] expected an initialised session, got none; try rm_abstract.init()")
    return active


def _change(active: Session, settings: config.Settings) -> None:
    active.change(settings, _resolve_early(settings))


def _close(active: Session) -> None:
    from rm_abstract.hooks import install

    active.disarm_all()
    active.close_workers()
    active.closed = True
    active.conflicts = install.uninstall(active)
    for line in active.conflicts:
        warnings.warn(f"[shutdown] {line}", RoutingWarning, stacklevel=3)


def _resolve_early(settings: config.Settings) -> _devices.Resolved | None:
    """An accelerator asked for by name is looked for now, and reported when it is not there."""
    if settings.text("device") in ("auto", "cpu"):
        return None
    resolved = _devices.resolve(settings)
    if resolved.fell_back and resolved.action == "warn":
        for note in resolved.notes:
            text = f"{note['code']} {note['message']}; {resolved.name} is used instead"
            warnings.warn(text, RoutingWarning, stacklevel=4)
    return resolved
