"""What `rm_abstract.compile` raises where a session would let PyTorch run the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


def _hooked(model: nn.Module) -> Any:
    model[0].register_forward_hook(lambda m, a, o: o * 2)  # type: ignore[index, operator]
    return contextlib.nullcontext()


def _training(model: nn.Module) -> Any:
    model.train()
    return contextlib.nullcontext()


def _autocast(model: nn.Module) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize(
    "change, code", [(_hooked, "RM102"), (_training, "RM101"), (_autocast, "RM106")]
)
def test_a_call_that_cannot_be_compiled_is_a_compile_error(
    change: Callable[[nn.Module], Any], code: str, before: int
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    with rm.compile(model, device="cpu") as run:
        for _ in range(before):
            run(x)
        with change(model), pytest.raises(rm.CompileError) as raised:
            run(x)
    assert raised.value.code == code and raised.value.remedy
    assert "fallback" not in str(raised.value)


def test_an_argument_that_cannot_be_taken_is_a_compile_error() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor, other: object) -> torch.Tensor:
            return x + 1

    with rm.compile(Wide().eval(), device="cpu") as run, pytest.raises(rm.CompileError) as raised:
        run(torch.ones(2), object())
    assert raised.value.code == "RM104"


def test_a_closed_one_says_so() -> None:
    run = rm.compile(nn.Linear(2, 2).eval(), device="cpu")
    run.close()
    with pytest.raises(rm.Error, match="closed"):
        run(torch.ones(1, 2))
