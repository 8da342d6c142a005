"""vLLM as the engine of one model: implements remote.engine.Kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rm_abstract.generation.request import GenerationRequest
from rm_abstract.generation.vllm import options
from rm_abstract.generation.vllm.mapping import Plan, plan
from rm_abstract.worker.interpreter import interpreter

_PROGRAM = Path(__file__).resolve().parent / "serving.py"


class Vllm:
    """``given``: engine_options as JSON text; ``device``: the session's, such as "cuda:0"."""

    name = "vllm"
    start_option = "start_timeout_s in engine_options"
    repeats = False  # it may draw, and its numbers are its own

    def __init__(self, given: str, device: str) -> None:
        self._options: dict[str, Any] = json.loads(given) if given else {}
        self._device = device
        options.check(self._options, device)

    def plan(self, request: GenerationRequest, longest: float) -> Plan:
        return plan(request, longest)

    def command(self) -> list[str]:
        return [interpreter(options.backend(self._device)), str(_PROGRAM)]

    def environment(self) -> dict[str, str]:
        return options.environment(self._options, self._device)

    def arguments(self, model: Any, rows: int) -> dict[str, Any]:
        return self.arguments_for(str(model.dtype).removeprefix("torch."))

    def arguments_for(self, dtype: str) -> dict[str, Any]:
        """``dtype``: "float32", or "auto" for the checkpoint's."""
        return options.arguments(self._options, dtype, self.device())

    def batch(self, rows: int) -> int:
        return 1  # it batches requests itself

    def supports(self, rows: int, facts: dict[str, Any]) -> bool:
        return True

    def device(self) -> str:
        return self._device.partition(":")[0]

    def start_timeout_s(self) -> float:
        return float(self._options.get("start_timeout_s", options.OURS["start_timeout_s"]))

    def load_timeout_s(self) -> float:
        return 0.0

    def step_timeout_s(self) -> float:
        return float("inf")  # others' requests may be before it

    def idle_timeout_s(self) -> float:
        return float(self._options.get("idle_timeout_s", options.OURS["idle_timeout_s"]))

    def probe(self, rows: int) -> list[dict[str, Any]] | None:
        if "quantization" in self._options or "dtype" in self._options:
            return None
        return [{"temperature": 0.0, "ignore_eos": True, "logprobs": 0}]
