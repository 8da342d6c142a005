"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_COUNTS = {
    "generated_tokens": "Tokens generated.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens taken from earlier prompts.",
    "steps": "Decoding steps.",
    "step_rows": "Rows in decoding steps, summed.",
    "steps_apart": "Decoding steps that failed and were made again for each row alone.",
}
_GAUGES = {"waiting": "Requests waiting.", "running": "Requests being computed."}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engines = _Engines()
        self.registry.register(self._engines)
        self.requests = Counter(
            "rm_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self.first_token = Histogram(
            "rm_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "rm_request_seconds",
            "From a request to the end of its answer.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.cancelled = Counter(
            "rm_cancelled", "Requests whose client left.", registry=self.registry
        )

    def watch(self, model: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Reads an engine's counts whenever metrics are asked for."""
        self._engines.models[model] = facts

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))


class _Engines:
    """A collector of prometheus_client: one family a count, one row a model."""

    def __init__(self) -> None:
        self.models: dict[str, Callable[[], dict[str, Any]]] = {}

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> list[Any]:
        found = {model: facts() for model, facts in self.models.items()}
        families: list[Any] = []
        for kind, texts in ((CounterMetricFamily, _COUNTS), (GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items():
                family = kind(f"rm_{name}", text, labels=["model"])
                for model, facts in found.items():
                    if name in facts:
                        family.add_metric([model], facts[name])
                families.append(family)
        return families
