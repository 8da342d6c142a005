"""Calls that the router serves itself, without Python between arguments and results.

A program comes there once Python has timed its first calls; what these tests ask is that nothing
else changes by it.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.engines import variant
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.hooks.attaching import router_of

ENOUGH = 70  # calls after which Python has nothing left to decide


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"sum": x * self.weight + more["y"], "parts": (x.exp(), 3)}


@pytest.fixture
def session(tmp_path: Any) -> Iterator[Callable[..., Any]]:
    def start(**options: Any) -> Any:
        rm.shutdown()
        options.setdefault("compile_options", {"when_slower": "compiled"})
        return rm.init("cpu", cache_dir=str(tmp_path), **options)

    yield start
    rm.shutdown()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each call that reaches Python."""
    seen: list[int] = []
    run = CompiledCall.run

    def counted(self: CompiledCall, flat_inputs: tuple[Any, ...]) -> Any:
        seen.append(len(flat_inputs))
        return run(self, flat_inputs)

    monkeypatch.setattr(CompiledCall, "run", counted)
    return seen


def entry(model: nn.Module) -> dict[str, Any]:
    router = router_of(model)
    assert router is not None
    (found,) = router.record()["entries"]
    return dict(found)


def test_a_call_of_tensors_stays_in_the_router(
    session: Callable[..., Any], in_python: list[int]
) -> None:
    session(verify="first")
    model = Two().eval()
    stock = copy.deepcopy(model)
    rm.accelerate(model)
    with torch.no_grad():
        for size in range(2, ENOUGH + 2):  # the sizes are no matter
            model(torch.ones(size, 8), {"y": torch.ones(8)})
        in_python.clear()
        for size in (2, 5, 17):
            x, y = torch.randn(size, 8), torch.randn(8)
            torch.testing.assert_close(model(x, more={"y": y}), stock(x, {"y": y}))
    assert in_python == []
    router = router_of(model)
    assert router is not None
    assert entry(model)["calls"] == router.routed_calls
    assert router.served_latest_call


def test_other_sizes_and_changed_weights_go_back_to_python(
    session: Callable[..., Any], in_python: list[int]
) -> None:
    session(verify="first")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    rm.accelerate(model)
    with torch.no_grad():
        for _ in range(ENOUGH):
            model(torch.ones(4, 8))
        in_python.clear()
        model(torch.ones(1, 8))  # size 1: a capture of its own
        assert len(in_python) == 1
        model[0].weight.zero_()
        model[0].bias.fill_(2.0)
        assert torch.equal(model(torch.ones(4, 8)), torch.full((4, 8), 2.0))
        for _ in range(ENOUGH):
            model(torch.ones(4, 8))
        in_python.clear()
        assert torch.equal(model(torch.ones(3, 8)), torch.full((3, 8), 2.0))
    assert in_python == []


def test_samples_are_compared_all_the_same(
    session: Callable[..., Any], in_python: list[int]
) -> None:
    session(verify="100")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    rm.accelerate(model)
    with torch.no_grad():
        for _ in range(310):
            model(torch.ones(4, 8))
    assert len(in_python) < 100
    assert entry(model)["compared"] == 4  # the gate and three samples


def test_an_image_is_told_by_its_layout(session: Callable[..., Any], in_python: list[int]) -> None:
    session(verify="first")
    torch.manual_seed(0)
    model = nn.Conv2d(4, 4, 3).eval()
    stock = copy.deepcopy(model)
    rm.accelerate(model)
    image = torch.randn(2, 4, 8, 8)
    forms = [
        image,
        image.to(memory_format=torch.channels_last),
        image.transpose(2, 3),
        image[:, :, ::2],
    ]
    with torch.no_grad():
        for form in forms:
            for _ in range(ENOUGH):
                model(form)
        in_python.clear()
        for form in forms:
            mine, theirs = model(form), stock(form)
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
    # What torch answers about channels last is asked in Python; the other forms are direct.
    assert len(in_python) <= 1


def test_threads_share_a_program(session: Callable[..., Any]) -> None:
    session(verify="first")
    model = Two().eval()
    stock = copy.deepcopy(model)
    rm.accelerate(model)
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(100):
                size = int(torch.randint(2, 9, (), generator=draw))
                x, y = torch.randn(size, 8, generator=draw), torch.randn(8, generator=draw)
                mine, theirs = model(x, {"y": y}), stock(x, {"y": y})
                if not torch.allclose(mine["sum"], theirs["sum"]):
                    wrong.append(seed)
                    return

    with torch.no_grad():
        for _ in range(ENOUGH):
            model(torch.ones(4, 8), {"y": torch.ones(8)})
    before = entry(model)["calls"]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert entry(model)["calls"] == before + 400


def test_python_decides_where_a_programs_device_says_so(
    session: Callable[..., Any], in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a GPU's programs while the script captures a graph of its own."""
    captures = [False]
    monkeypatch.setattr(variant, "core_of", lambda program: (program, lambda: captures[0]))
    session(verify="first")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    stock = copy.deepcopy(model)
    rm.accelerate(model)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(ENOUGH):
            model(x)
        in_python.clear()
        for captures[0] in (False, True, False, True):
            torch.testing.assert_close(model(x), stock(x))
            assert len(in_python) == int(captures[0])
            in_python.clear()


class Builder:
    """Makes the output of a program, and holds something."""

    def __init__(self, build: Callable[..., Any], holds: object) -> None:
        self._build, self.holds = build, holds

    def __call__(self, results: Any, tensors: Any) -> Any:
        return self._build(results, tensors)


def served_with_a_builder(holds: Callable[[nn.Module], object]) -> tuple[nn.Module, Any]:
    """A model whose calls the router serves, and the builder of its output."""
    model = rm.accelerate(Two().eval())
    more = {"y": torch.ones(8)}
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(4, 8), more)
        router = router_of(model)
        assert router is not None
        (variant,) = router.engine.variants()  # type: ignore[union-attr]
        variant._build = Builder(variant._build, holds(model))
        for _ in range(ENOUGH):
            model(torch.ones(4, 8), more)
    assert variant.direct is not None
    return model, variant._build


def test_a_model_that_its_output_refers_to_is_collected(session: Callable[..., Any]) -> None:
    session(verify="first")
    model, build = served_with_a_builder(lambda model: model)
    gone = weakref.ref(model), weakref.ref(build)
    del model, build
    gc.collect()
    assert [found() for found in gone] == [None, None]


def test_what_calls_still_need_is_not_collected(session: Callable[..., Any]) -> None:
    """The variant dies before the router's table that runs its program."""
    session(verify="first")
    model, build = served_with_a_builder(lambda model: [])
    build.holds.append(build)  # type: ignore[attr-defined]
    router = router_of(model)
    assert router is not None and router.engine is not None
    for call in router.engine._entries.values():  # type: ignore[attr-defined]
        call.variants.clear()  # nothing in Python refers to the router's program any more
    known = weakref.ref(build)
    del build
    gc.collect()
    assert known() is not None
    x, y = torch.randn(4, 8), torch.randn(8)
    with torch.no_grad():
        torch.testing.assert_close(model(x, {"y": y})["sum"], x * model.weight + y)
