"""Outputs that eager gives with stride 0: they come back as such, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


@pytest.fixture(autouse=True)
def session(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path))
    yield rm.init()
    rm.shutdown()


class Scaled(nn.Module):
    """What `body` makes of a weighted input."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.arange(1.0, 6.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x, x * self.weight)


def both(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of eager and of our program (the second call of this size)."""

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            y = model(x)
        return [y] if isinstance(y, torch.Tensor) else list(y)

    with rm.disabled():
        expected = outputs()
    outputs()
    before = routed(model)
    actual = outputs()
    assert routed(model) == before + 1
    return expected, actual


def routed(model: nn.Module) -> int:
    for router in rm.session.current().routers():
        if router.module_ref() is model:
            return int(router.route.stats()["routed"])
    return 0


BODIES: dict[str, Callable[..., Any]] = {
    "of a result": lambda x, y: y.unsqueeze(0).expand(7, -1, -1),
    "of an input": lambda x, y: x.unsqueeze(1).expand(-1, 3, -1),
    "of a part": lambda x, y: y[:, 1:2].expand(-1, 4),
    "of a transpose": lambda x, y: y.t().unsqueeze(1).expand(-1, 6, -1),
    "as long as another": lambda x, y: y[:1].expand(x.shape[0] + 1, -1),
    "twice of one": lambda x, y: (y.expand(2, -1, -1), y.unsqueeze(1).expand(-1, 3, -1), y),
    "along two axes": lambda x, y: y[:, :1, None].expand(-1, 4, 8),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_expanded_output_has_eagers_values_and_repeats_as_eagers_does(name: str) -> None:
    model = Scaled(BODIES[name]).eval()
    for rows in (3, 4, 6):
        expected, actual = both(model, torch.randn(rows, 5))
        for e, a in zip(expected, actual, strict=True):
            torch.testing.assert_close(a, e)
            repeats = [s == 0 and n > 1 for s, n in zip(e.stride(), e.shape, strict=True)]
            assert [s == 0 for s in a.stride()] == repeats
            for out in (e, a):
                if any(repeats):
                    with pytest.raises(RuntimeError, match="single memory location"):
                        out.add_(1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: y.expand(2, -1, -1).clone(),
        lambda x, y: y.unsqueeze(1).expand(-1, 3, -1).contiguous(),
        lambda x, y: y.repeat(3, 1),
        lambda x, y: (torch.zeros(4, 4), y + 0, torch.full_like(y, 2.0)),
        lambda x, y: (y.expand(2, -1, -1), y.expand(2, -1, -1).clone())[1],
    ],
    ids=["clone", "contiguous", "repeat", "constants", "both"],
)
def test_a_dense_output_that_only_holds_repeated_values_can_be_written(
    body: Callable[..., Any],
) -> None:
    expected, actual = both(Scaled(body).eval(), torch.randn(3, 5))
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, e)
        assert 0 not in a.stride()
        torch.testing.assert_close(
            a.view(-1).add_(torch.arange(a.numel())).view_as(e),
            e + torch.arange(a.numel()).view_as(e),
        )


def test_an_expanded_output_outlives_the_model_and_keeps_its_values_over_later_calls() -> None:
    model = Scaled(BODIES["of a result"]).eval()
    expected, actual = both(model, torch.ones(2, 5))
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(2, 5))
    del model
    torch.testing.assert_close(actual[0], expected[0])
