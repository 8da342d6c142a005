"""optimum-rbln as the engine of one model: implements remote.engine.Kind.

Serves greedy generations; others are declined by the name of what they ask for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.generation.request import GenerationRequest
from rm_abstract.generation.vllm import mapping
from rm_abstract.worker.interpreter import inherited, interpreter

_PROGRAM = Path(__file__).resolve().parent / "serving.py"
_LONGEST = 32768  # tokens of a row, in optimum-rbln's attention without partitions
_GREEDY = {"max_tokens", "ignore_eos", "stop_token_ids", "temperature"}
_PROBE: dict[str, Any] = {"stop_token_ids": [], "logprobs": 0}
_groups = itertools.count(1)


@dataclass
class Plan:
    """One request a row, which the worker puts together again."""

    prompts: list[list[int]]
    sampling: dict[str, Any]

    def rows(self) -> list[tuple[list[int], dict[str, Any]]]:
        group, count = f"g{next(_groups)}", len(self.prompts)
        return [
            (prompt, {**self.sampling, "group": group, "row": row, "rows": count})
            for row, prompt in enumerate(self.prompts)
        ]


class OptimumRbln:
    """``device``: the session's, such as "rbln:1"."""

    name = "optimum-rbln"
    start_option = "timeout_s in compile_options"
    repeats = True  # greedy tokens, compared with PyTorch's

    def __init__(self, settings: Settings, device: str) -> None:
        self._settings, self._device = settings, device
        self._given = settings.integers("batch_size")
        self._sizes = set(self._given)
        self._lengths = settings.integers("sequence_length")

    def plan(self, request: GenerationRequest, longest: float) -> Plan:
        found = mapping.plan(request, longest)
        other = sorted(set(found.sampling) - _GREEDY)
        if found.sampling["temperature"] != 0:
            raise Decline("RM332", "do_sample")
        if other:
            raise Decline("RM332", f"generation with {', '.join(other)}")
        if self._given and len(found.prompts) > max(self._given):
            raise Decline("RM105", f"{len(found.prompts)} rows, more than batch_size has")
        return Plan(found.prompts, found.sampling)

    def command(self) -> list[str]:
        return [interpreter("rbln"), str(_PROGRAM)]

    def environment(self) -> dict[str, str]:
        values = inherited("rbln")
        return {**values, "RM_DISABLE": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}

    def batch(self, rows: int) -> int:
        """The next of batch_size, else the next power of two."""
        if self._given:
            return min(size for size in self._given if size >= rows)
        return 1 << (rows - 1).bit_length()

    def supports(self, rows: int, facts: dict[str, Any]) -> bool:
        return self.batch(rows) in facts["batch_sizes"]

    def arguments(self, model: Any, rows: int) -> dict[str, Any]:
        from rm_abstract.vendors.rbln import description

        self._sizes.add(self.batch(rows))
        options = self._settings.of_plugin("rbln")
        arch = description.devices()[self._index].arch
        return {
            "batch_sizes": sorted(self._sizes),
            "max_seq_len": self._longest(model),
            "npu": None if arch == description.UNKNOWN else arch,
            "num_devices": int(options.get("num_devices", "1")),
            "driver": description.driver(),
            "salt": self._settings.text("cache_salt"),
            "cache": self._cache(),
        }

    def device(self) -> str:
        return self._device

    def start_timeout_s(self) -> float:
        return float(self._settings.text("timeout_s")) or float("inf")

    def load_timeout_s(self) -> float:
        return float(self._settings.text("load_timeout_s")) or float("inf")

    def step_timeout_s(self) -> float:
        return float(self._settings.text("execute_timeout_s")) or float("inf")

    def idle_timeout_s(self) -> float:
        return 0.0

    def probe(self, rows: int) -> list[dict[str, Any]] | None:
        return [sampling for _, sampling in Plan([[]] * rows, _PROBE).rows()]

    @property
    def _index(self) -> int:
        return int(self._device.partition(":")[2] or 0)

    def _longest(self, model: Any) -> int:
        """Tokens of a row that the programs are made for."""
        own = int(model.config.get_text_config().max_position_embeddings)
        return min(max(self._lengths) if self._lengths else own, own, _LONGEST)

    def _cache(self) -> str:
        """The folder programs are kept in; empty: they are not kept."""
        from rm_abstract import _core

        if self._settings.text("cache_mode") != "readwrite":
            return ""
        folder = self._settings.text("cache_dir") or _core.cache.default_directory()
        return str(Path(folder).absolute() / "optimum_rbln")
