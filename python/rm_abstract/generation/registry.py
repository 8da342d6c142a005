"""Which engine generates text for a name of the option inference_engine. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rm_abstract.base.config import Settings
from rm_abstract.base.errors import ConfigError

if TYPE_CHECKING:
    from rm_abstract.generation.remote.engine import RemoteEngine

WITH_OPTIONS = ("vllm", "onnxruntime")


def check(settings: Settings) -> None:
    """Refuses what the session could not do later. Raises ConfigError; Error (RM330) when the
    software of the engine is missing."""
    name = settings.text("inference_engine")
    options = json.loads(settings.text("engine_options"))
    if options and name not in WITH_OPTIONS:
        raise ConfigError(
            f"[engine_options] expected an engine that has options, got inference_engine={name!r} "
            f"from {settings.source('inference_engine')}; try inference_engine='vllm'"
        )
    if name == "vllm":
        from rm_abstract.generation.vllm import options as vllm

        vllm.check(options, settings.text("device"))
    if name == "onnxruntime":
        from rm_abstract.engines import onnxruntime_options

        onnxruntime_options.check(options)
        if settings.text("precision") != "auto":
            raise ConfigError(
                f"[precision] expected 'auto' with inference_engine='onnxruntime', got "
                f"{settings.text('precision')!r} from {settings.source('precision')}; try 'auto'"
            )


def remote_engine(
    settings: Settings,
    device: str,
    watch: Callable[[], Any],
    notice: Callable[[str, str], None],
) -> RemoteEngine | None:
    """The engine of one model; None where the core's programs generate. Starts nothing."""
    name = settings.text("inference_engine")
    if name == "auto" and device.startswith("rbln:"):
        return _rebellions(settings, device, watch, notice)
    if name == "auto" and (properties := _own_generation(device)):
        return _plugins(settings, device, properties, watch, notice)
    if name != "vllm":
        return None
    from rm_abstract.generation.remote.engine import RemoteEngine
    from rm_abstract.generation.vllm import options
    from rm_abstract.generation.vllm.engine import Vllm

    if options.backend(settings.text("device")) == "rbln" != options.backend(device):
        return None  # the NPU is not there: the session said so, and vllm-rbln runs on no other
    kind = Vllm(settings.text("engine_options"), device)
    return RemoteEngine(
        kind,
        watch,
        notice,
        settings.text("worker_log_dir"),
        float(settings.text("stall_timeout_s")),
    )


def _own_generation(device: str) -> dict[str, str]:
    """The properties of a device whose plugin generates itself; empty for any other."""
    from rm_abstract import _core

    name, _, index = device.partition(":")
    for row in _core.backend.backends():
        if row["name"] == name and row["available"] and not row["kernels"]:
            at = int(index or 0)
            found = dict(row["devices"][at]["properties"]) if at < len(row["devices"]) else {}
            return found if found.get("generates") == "1" and _has_its_software(name, found) else {}
    return {}


def _has_its_software(name: str, properties: dict[str, str]) -> bool:
    from rm_abstract.worker.interpreter import has_packages

    needed = properties.get("generator_packages", "").split()
    return not needed or has_packages(name, *needed)


def _plugins(
    settings: Settings,
    device: str,
    properties: dict[str, str],
    watch: Callable[[], Any],
    notice: Callable[[str, str], None],
) -> RemoteEngine:
    """The generation of a plugin of anybody's."""
    from rm_abstract.generation.plugin.engine import PluginGeneration
    from rm_abstract.generation.remote.engine import RemoteEngine

    return RemoteEngine(
        PluginGeneration(settings, device, properties),
        watch,
        notice,
        settings.text("worker_log_dir"),
        float(settings.text("stall_timeout_s")),
    )


def _rebellions(
    settings: Settings,
    device: str,
    watch: Callable[[], Any],
    notice: Callable[[str, str], None],
) -> RemoteEngine | None:
    """optimum-rbln, where the environment of Rebellions' software has it."""
    from rm_abstract.generation.rbln import engine
    from rm_abstract.generation.remote.engine import RemoteEngine
    from rm_abstract.worker.interpreter import has_packages

    if not has_packages("rbln", "optimum-rbln"):
        return None
    kind = engine.OptimumRbln(settings, device)
    return RemoteEngine(
        kind,
        watch,
        notice,
        settings.text("worker_log_dir"),
        float(settings.text("stall_timeout_s")),
    )
