"""A decomposition may not branch on a size, with every torch that is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rm_abstract.capture import decompositions


class Logsumexp(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.logsumexp(x, -1)


@pytest.fixture
def exported() -> torch.fx.Node:
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        Logsumexp(), (torch.randn(4, 8),), dynamic_shapes={"x": {0: rows}}
    )
    return next(n for n in program.graph.nodes if n.op == "call_function")


def _environment(node: torch.fx.Node) -> Any:
    return node.meta["val"].fake_mode.shape_env


class _Older:
    """The environment of sizes as torch 2.10 and 2.11 have it."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def _check_frozen(self, expression: Any, value: Any) -> None: ...

    def evaluate(self) -> None:
        self._check_frozen("s0", 4)


def test_an_operator_is_written_in_others(exported: torch.fx.Node) -> None:
    found = decompositions.decomposed(exported.target, exported.args, exported.kwargs)
    assert found is not None
    names = {str(n.target) for n in found[0].graph.nodes if n.op == "call_function"}
    assert "aten.exp.default" in names and "aten.logsumexp.default" not in names


def test_a_branch_on_a_size_is_refused(exported: torch.fx.Node) -> None:
    environment = _environment(exported)
    size = exported.meta["val"].shape[0]
    guards = len(environment.guards)
    with pytest.raises(Exception), decompositions._no_new_guards(environment):  # noqa: B017
        bool(size == 4)
    assert len(environment.guards) == guards
    assert bool(size == 4) and len(environment.guards) > guards  # it raises no longer


def test_an_older_torch_refuses_too() -> None:
    older = _Older(None)
    with pytest.raises(decompositions._NewGuard), decompositions._no_new_guards(older):
        older.evaluate()
    older.evaluate()
