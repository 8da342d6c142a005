"""The first call ends: captures have a time limit, and what failed is not tried again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.capture import budget


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3))


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if x.sum() > 0 else x


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    yield
    rm.shutdown()


@pytest.fixture
def exports(monkeypatch) -> list[object]:
    """The `dynamic_shapes` of every run of torch.export."""
    seen: list[object] = []
    stock = torch.export.export

    def counted(*args, **kwargs):
        seen.append(kwargs["dynamic_shapes"])
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return seen


def served(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Calls that a program served, each of them checked against the original."""
    with torch.no_grad():
        for x in inputs:
            found = model(x)
            with rm.disabled():
                torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    return vars(model)["_compiled_call_impl"].route.routed()


def reasons(model: nn.Module) -> dict[str, str]:
    declined = vars(model)["_compiled_call_impl"].route.stats()["declined"]
    return {code: detail for code, (_, detail) in declined.items() if code != "RM108"}


def test_images_keep_their_height_and_width_and_serve_every_batch(exports):
    rm.init("cpu")
    model = rm.accelerate(Images().eval())
    assert served(model, *[torch.randn(n, 3, 16, 16) for n in (2, 2, 3, 5)]) == 3
    assert len(exports) == 1
    assert served(model, torch.randn(2, 3, 24, 24), torch.randn(4, 3, 24, 24)) == 4
    assert len(exports) == 2


def test_a_capture_that_takes_too_long_is_made_for_the_sizes_of_the_call(exports, monkeypatch):
    monkeypatch.setattr(budget, "FIRST_S", -1.0)
    rm.init("cpu")
    model = rm.accelerate(Vectors().eval())
    assert served(model, torch.randn(2, 8), torch.randn(2, 8)) == 1
    assert [bool(shapes[0][0]) for shapes in exports] == [True, False]


def test_a_capture_without_an_end_leaves_the_call_to_the_original(exports, monkeypatch):
    monkeypatch.setattr(budget, "FIRST_S", -1.0)
    monkeypatch.setattr(budget, "SECOND_S", -1.0)
    rm.init("cpu")
    model = rm.accelerate(Vectors().eval())
    with pytest.warns(rm.RoutingWarning, match="RM208"):
        assert served(model, *[torch.randn(2, 8)] * 3) == 0
    assert len(exports) == 2 and "captured within" in reasons(model)["RM208"]


@pytest.mark.parametrize("failure", ["too long", "control flow"])
def test_another_session_does_not_try_a_failed_capture_again(exports, monkeypatch, failure):
    if failure == "too long":
        monkeypatch.setattr(budget, "FIRST_S", -1.0)
        monkeypatch.setattr(budget, "SECOND_S", -1.0)
    kind, code = (Vectors, "RM208") if failure == "too long" else (Branching, "RM203")
    for session in range(2):
        with rm.init("cpu"):
            model = rm.accelerate(kind().eval())
            with pytest.warns(rm.RoutingWarning, match=code):
                served(model, torch.ones(2, 8), torch.ones(2, 8))
            known = "found by an earlier capture" in reasons(model)[code]
        assert known == (session == 1)
        if session == 0:
            tried = len(exports)
            assert tried > 0
    assert len(exports) == tried


def test_a_defect_of_ours_in_a_capture_is_not_met_again_by_the_next_session(exports, monkeypatch):
    from rm_abstract.capture import export

    def broken(*args, **kwargs):
        raise KeyError("a defect")

    monkeypatch.setattr(export, "import_program", broken)
    for session in range(2):
        with rm.init("cpu"), pytest.warns(rm.RoutingWarning, match="RM306"):
            model = rm.accelerate(Vectors().eval())
            served(model, torch.ones(2, 8), torch.ones(2, 8))
            assert ("found by an earlier" in reasons(model)["RM306"]) == (session == 1)
    assert len(exports) == 1


def test_swapped_axes_are_transposed():
    class Swapped(Vectors):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return torch.swapaxes(y, 0, -1) + y.swapdims(0, 1)

    with rm.init("cpu"):
        assert served(rm.accelerate(Swapped().eval()), *[torch.randn(2, 8)] * 3) == 2


def test_refreshing_the_cache_tries_again(exports, monkeypatch):
    with rm.init("cpu"), pytest.warns(rm.RoutingWarning, match="RM203"):
        served(rm.accelerate(Branching().eval()), torch.ones(2, 8))
    tried = len(exports)
    monkeypatch.setenv("RM_CACHE_MODE", "refresh")
    with rm.init("cpu"), pytest.warns(rm.RoutingWarning, match="RM203"):
        served(rm.accelerate(Branching().eval()), torch.ones(2, 8))
    assert len(exports) > tried


def test_on_a_busy_machine_a_call_waits_no_longer_and_nothing_is_remembered(exports, monkeypatch):
    monkeypatch.setattr(budget, "WAIT_S", -1.0)
    with rm.init("cpu"), pytest.warns(rm.RoutingWarning, match="RM208.*less busy"):
        assert served(rm.accelerate(Vectors().eval()), *[torch.randn(2, 8)] * 3) == 0
    assert len(exports) == 1
    monkeypatch.setattr(budget, "WAIT_S", 60.0)
    with rm.init("cpu"):
        assert served(rm.accelerate(Vectors().eval()), *[torch.randn(2, 8)] * 3) == 2


def test_a_capture_without_open_sizes_is_not_made_twice(exports, monkeypatch):
    monkeypatch.setattr(budget, "FIRST_S", -1.0)
    monkeypatch.setattr(budget, "SECOND_S", 0.0)
    with rm.init("cpu"), pytest.warns(rm.RoutingWarning, match="RM208"):
        served(rm.accelerate(Images().eval()), torch.randn(1, 3, 16, 16))
    assert len(exports) == 1


def test_a_slow_capture_says_so_once(monkeypatch, capfd):
    monkeypatch.setattr(budget, "SAY_AFTER_S", 0.0)
    rm.init("cpu")
    served(rm.accelerate(Vectors().eval()), torch.randn(2, 8), torch.randn(2, 8))
    assert capfd.readouterr().err.count("capturing Vectors for its first call") == 1
