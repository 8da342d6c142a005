"""One tensor after another is replaced while threads call the model: every result is made of
values that the tensors had between the call's start and its end."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable

import pytest
import torch
from soundness import quiet, report, routed
from torch import nn

import rm_abstract as rm
from rm_abstract.hooks.snapshots import MAX_PAUSE

WIDTH, THREADS = 64, 3
SWAPS = 2000 if os.environ.get("RM_HEAVY") == "1" else 60
X = torch.ones(4, WIDTH)
NAMES = ("inner.weight", "scale", "shift")


class Net(nn.Module):
    """All elements of a result are WIDTH * weight * scale + shift."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.shift


def place(model: Net, name: str) -> tuple[nn.Module, str, torch.Tensor]:
    owner = model.inner if name.startswith("inner") else model
    attribute = name.rpartition(".")[2]
    return owner, attribute, getattr(owner, attribute)


def full(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full(tensor.shape, value)


def by_attribute(model: Net, name: str, value: float) -> None:
    owner, attribute, tensor = place(model, name)
    new = full(tensor, value)
    setattr(owner, attribute, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)


def by_registry(model: Net, name: str, value: float) -> None:
    owner, attribute, tensor = place(model, name)
    if attribute in owner._buffers:
        owner._buffers[attribute] = full(tensor, value)
    else:
        owner._parameters[attribute] = nn.Parameter(full(tensor, value))


def by_loading(model: Net, name: str, value: float) -> None:
    new = full(place(model, name)[2], value)
    model.load_state_dict({name: new}, strict=False, assign=True)


def by_part(model: Net, name: str, value: float) -> None:
    if name != "inner.weight":
        return by_attribute(model, name, value)
    part = nn.Linear(WIDTH, WIDTH, bias=False, device="meta").eval()  # draws no random numbers
    part.weight = nn.Parameter(torch.full((WIDTH, WIDTH), value))
    model.inner = part
    return None


# Not by `tensor.data = other`: PyTorch's own operators then read freed memory in other threads.
WAYS: tuple[Callable[[Net, str, float], None], ...] = (
    by_attribute,
    by_registry,
    by_loading,
    by_part,
)


@pytest.mark.parametrize("pack", ["never", "first", "auto"])
def test_every_result_is_of_the_time_of_its_call(pack: str) -> None:
    rm.shutdown()
    rm.init("cpu", compile_options={"pack_weights": pack, "when_slower": "compiled"})
    rng = random.Random(5)
    model = Net().eval()
    # What each tensor holds after each swap; `begun` and `ended` count swaps.
    history = [dict.fromkeys(NAMES, 1.0)]
    for name in NAMES:
        by_attribute(model, name, 1.0)
    for _ in range(3):
        quiet(lambda: model(X))
    begun = ended = 0
    calls = [0] * THREADS
    stop, wrong = threading.Event(), []

    def allowed(first: int, last: int) -> set[float]:
        seen = [{history[i][name] for i in range(first, last + 1)} for name in NAMES]
        return {WIDTH * w * s + c for w, s, c in itertools.product(*seen)}

    def check(y: torch.Tensor, first: int, last: int) -> None:
        values = set(y.flatten().tolist())
        if len(values) != 1 or not any(
            abs(v - values.copy().pop()) < 1e-3 for v in allowed(first, last)
        ):
            wrong.append((first, last, sorted(values)[:3], sorted(allowed(first, last))[:8]))

    def serve(number: int) -> None:
        try:
            with torch.no_grad():
                while not stop.is_set():
                    first = ended
                    y = model(X)
                    check(y, first, begun)
                    calls[number] += 1
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        while ended < SWAPS and not wrong:
            name, way = rng.choice(NAMES), rng.choice(WAYS)
            history.append(history[-1] | {name: rng.randrange(1, 64) / 8})
            begun += 1
            way(model, name, history[-1][name])
            ended = begun
            for _ in range(rng.choice([1, 2, 8])):
                check(quiet(lambda: model(X)), ended, ended)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]
    assert min(calls) > 0
    # No swap made the model eager for good: behind the next one it is compiled again, when the
    # pauses of a model that kept changing end.
    by_attribute(model, "shift", 3.0)
    history.append(history[-1] | {"shift": 3.0})
    begun, ended = begun + 1, ended + 1
    before, tries = routed(model), 0
    while routed(model) == before and tries < 4 * MAX_PAUSE and not wrong:
        check(quiet(lambda: model(X)), ended, ended)
        tries += 1
    assert routed(model) > before and not wrong, report(model)["reasons"]
