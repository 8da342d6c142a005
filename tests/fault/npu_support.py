"""A small encoder of plain torch and a session on the simulated NPU: for tests of faults."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import rm_abstract as rm


class Encoder(nn.Module):
    """Tokens to vectors, with a mask; the same weights in every process."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        keep = attention_mask[:, :, None].to(x.dtype)
        mean = (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        x = self.norm(x + mean)
        return self.norm(x + self.second(torch.nn.functional.gelu(self.first(x)))) * keep


class Running(nn.Module):
    """Nothing the device can run: a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * self.scale, 1)


def call_of(batch: int = 2, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % 49 + 1
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def npu(**settings: Any) -> Iterator[Any]:
    """A session on the simulated NPU. RM_SIM_* of this process reach the workers it starts."""
    session = rm.init("sim:0", **settings)
    try:
        yield session
    finally:
        rm.shutdown()


@dataclass
class Result:
    """What a few calls of one model gave."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    expected: torch.Tensor | None = None
    errors: list[Exception] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return all(torch.allclose(o, self.expected, atol=1e-5) for o in self.outputs)

    @property
    def codes(self) -> set[str]:
        return {reason["code"] for m in self.report["models"] for reason in m["reasons"]}

    @property
    def routed(self) -> int:
        return int(self.report["routed"])


def run(calls: int = 3, model: nn.Module | None = None, inputs: Any = None) -> Result:
    """Calls a model in the current session, and the original."""
    model = rm.accelerate((model or Encoder()).eval())
    inputs = call_of() if inputs is None else inputs
    result = Result()
    with torch.no_grad():
        with rm.disabled():
            result.expected = model(**inputs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(calls):
                try:
                    result.outputs.append(model(**inputs))
                except rm.Error as error:
                    result.errors.append(error)
        result.warned = [str(w.message) for w in caught]
    result.report = rm.explain(model).to_dict()
    return result


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def worker_pids() -> list[int]:
    """The workers of the current session."""
    session = rm.session.current()
    return [pid for pool in session._workers.values() for pid in pool.alive()]


def python_environment() -> dict[str, str]:
    """This process's, with the package where it was imported from."""
    package = os.path.dirname(os.path.dirname(rm.__file__))
    return {**os.environ, "PYTHONPATH": package, "HF_HUB_OFFLINE": "1"}
