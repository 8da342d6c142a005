"""What the tests of this folder share: a session, a call, and the comparison with eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rm_abstract as rm

X = torch.arange(32.0).reshape(4, 8) / 32


def quiet(call: Callable[[], Any]) -> Any:
    """Runs a call without gradients and without warnings of ours."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", rm.RoutingWarning)
        return call()


def eager(call: Callable[[], Any]) -> Any:
    with rm.disabled():
        return quiet(call)


def report(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = rm.explain(model).to_dict()["models"][0]
    return found


def routed(model: nn.Module) -> int:
    return int(report(model)["routed"])


def same_as_eager(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    expected = eager(lambda: model(*args, **kwargs))
    torch.testing.assert_close(
        quiet(lambda: model(*args, **kwargs)), expected, rtol=1e-4, atol=1e-4
    )


class Base(nn.Module):
    """Eight numbers to eight numbers: `inner`, and what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
