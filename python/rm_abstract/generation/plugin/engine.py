"""A plugin's own generation as the engine of one model: implements remote.engine.Kind.

Greedy generations, and those that sample with what the plugin names; others are declined by the
name of what they ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.generation.request import GenerationRequest
from rm_abstract.generation.vllm import mapping
from rm_abstract.worker.interpreter import environment, interpreter

_PROGRAM = Path(__file__).resolve().parent / "serving.py"
_GREEDY = {"max_tokens", "ignore_eos", "stop_token_ids", "temperature"}
_groups = itertools.count(1)


@dataclass
class Plan:
    """One request a row, which the process puts together again."""

    inner: mapping.Plan

    def rows(self) -> list[tuple[list[int], dict[str, Any]]]:
        group, rows = f"g{next(_groups)}", self.inner.rows()
        return [
            (prompt, {**sampling, "group": group, "row": row, "rows": len(rows)})
            for row, (prompt, sampling) in enumerate(rows)
        ]


class PluginGeneration:
    """``device``: the session's, such as "zeta:1"; ``properties``: of that device."""

    repeats = True
    start_option = "timeout_s in compile_options"

    def __init__(self, settings: Settings, device: str, properties: Mapping[str, str]) -> None:
        self.name = device.partition(":")[0]
        self._settings, self._device = settings, device
        self._samples = set(properties.get("samples", "").split())

    def plan(self, request: GenerationRequest, longest: float) -> Plan:
        found = mapping.plan(request, longest)
        sampled = found.sampling["temperature"] != 0
        if sampled and "temperature" not in self._samples:
            raise Decline("RM332", "do_sample")
        other = sorted(set(found.sampling) - _GREEDY - self._samples)
        if other:
            raise Decline("RM332", f"generation with {', '.join(other)}")
        return Plan(found)

    def command(self) -> list[str]:
        return [interpreter(self.name), str(_PROGRAM), self.name]

    def environment(self) -> dict[str, str]:
        pairs = (row.split("=", 1) for row in environment(self.name))
        return {**dict(pairs), "RM_DISABLE": "1"}

    def batch(self, rows: int) -> int:
        return 1 << (rows - 1).bit_length()

    def supports(self, rows: int, facts: dict[str, Any]) -> bool:
        return True

    def arguments(self, model: Any, rows: int) -> dict[str, Any]:
        own = self._settings.of_plugin(self.name)
        return {"options": {**own, "cache_folder": self._cache()}}

    def device(self) -> str:
        return self._device

    def start_timeout_s(self) -> float:
        return float(self._settings.text("timeout_s")) or float("inf")

    def load_timeout_s(self) -> float:
        return 0.0

    def step_timeout_s(self) -> float:
        return float(self._settings.text("execute_timeout_s")) or float("inf")

    def idle_timeout_s(self) -> float:
        return 0.0

    def probe(self, rows: int) -> list[dict[str, Any]] | None:
        greedy = {"temperature": 0.0, "stop_token_ids": [], "logprobs": 0}
        return [sampling for _, sampling in Plan(mapping.Plan([[]] * rows, greedy)).rows()]

    def _cache(self) -> str:
        """The folder it may keep programs in; empty: it may not."""
        from rm_abstract import _core

        if self._settings.text("cache_mode") != "readwrite":
            return ""
        folder = self._settings.text("cache_dir") or _core.cache.default_directory()
        return str(Path(folder).absolute() / f"{self.name}_generation")
