"""Outputs of classes that torch's pytree knows, of dataclasses, and of sizes, are served whole."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rm_abstract as rm


@dataclasses.dataclass
class Sample:
    sample: torch.Tensor
    steps: int = 3
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Doubling:
    """What its constructor does must not be done again."""

    y: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", self.y * 2)


@dataclasses.dataclass
class Registered(OrderedDict):  # type: ignore[type-arg]
    """As diffusers' BaseOutput: a dictionary, a dataclass, and a node of pytree."""

    sample: Any = None

    def __post_init__(self) -> None:
        self["sample"] = self.sample


pytree.register_pytree_node(
    Registered,
    lambda v: (list(v.values()), list(v.keys())),
    lambda values, context: Registered(**dict(zip(context, values, strict=True))),
    serialized_type_name="tests.Registered",
)


class Pair(NamedTuple):
    first: Any
    second: Any


class Halved(Pair):
    """What its constructor does must not be done again."""

    __slots__ = ()

    def __new__(cls, first: Any, second: Any) -> Halved:
        return super().__new__(cls, first / 2, second / 2)


class Marked(Pair):
    """Its instances have attributes of their own."""


def marked(h: torch.Tensor) -> Marked:
    made = Marked(h, h)
    made.note = "more"  # type: ignore[attr-defined]
    return made


def local_classes() -> tuple[Any, Any]:
    class Local(NamedTuple):
        first: Any
        second: Any = None

    @dataclasses.dataclass
    class Record:
        first: Any
        second: Any = None

    return Local, Record


LocalPair, LocalRecord = local_classes()


class Holder:
    """No data."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@dataclasses.dataclass
class WithMore(Sample):
    """Holds something beside its fields."""

    def __post_init__(self) -> None:
        self.note = "more"


class Net(nn.Module):
    def __init__(self, outputs: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs(x, self.linear(x))


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


SERVED: dict[str, Callable[[Any, Any], Any]] = {
    "dataclass": lambda x, h: Sample(h, extra=[h + 1, None]),
    "frozen dataclass with work in its constructor": lambda x, h: Doubling(h),
    "registered class": lambda x, h: Registered(sample=h),
    "nested": lambda x, h: {"a": Sample(h, 1, Registered(sample=h * 2)), "b": (Doubling(h),)},
    "named tuple": lambda x, h: Pair(h, Sample(h - 1)),
    "named tuple with work in its constructor": lambda x, h: Halved(h, h + 1),
    "bounded queue": lambda x, h: deque([h, h + 1], maxlen=2),
    "sizes": lambda x, h: (h, x.shape[0], x.shape[0] * 2 + h.shape[1], x.shape, h.size()),
    "numbers": lambda x, h: (h, 0.5, -0.0, float("nan"), True, 7, "name"),
    "integers": lambda x, h: (h.argmax(1), h > 0, h.long(), h.to(torch.uint8)),
    "one tensor several times": lambda x, h: Sample(h, extra=(h, x, x, h.detach(), h)),
}


@pytest.mark.parametrize("outputs", SERVED.values(), ids=SERVED)
def test_such_outputs_are_served(outputs: Callable[[Any, Any], Any]) -> None:
    net = Net(outputs).eval()
    rm.accelerate(net)
    for size in (3, 3, 5, 3):
        x = torch.randn(size, 4)
        with torch.no_grad():
            with rm.disabled():
                expected = net(x)
            given = net(x)
        same(expected, given)
    assert rm.explain().routed >= 2, rm.explain()


def same(expected: Any, given: Any) -> None:
    assert type(given) is type(expected)
    if dataclasses.is_dataclass(expected):
        assert vars(given).keys() == vars(expected).keys()
        for name in vars(expected):
            same(getattr(expected, name), getattr(given, name))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected)
    elif isinstance(expected, dict):
        assert list(given) == list(expected)
        for key in expected:
            same(expected[key], given[key])
    elif isinstance(expected, (list, tuple, deque)):
        assert len(given) == len(expected)
        assert not isinstance(expected, deque) or given.maxlen == expected.maxlen
        for a, b in zip(expected, given, strict=True):
            same(a, b)
    elif not dataclasses.is_dataclass(expected):
        assert repr(given) == repr(expected)


@pytest.mark.parametrize(
    "outputs",
    [lambda x, h: LocalPair(h), lambda x, h: [LocalRecord(h)]],
    ids=["named tuple", "dataclass"],
)
def test_classes_that_cannot_be_imported_stay_eager(outputs: Callable[[Any, Any], Any]) -> None:
    net = Net(outputs).eval()
    rm.accelerate(net)
    x = torch.randn(3, 4)
    with pytest.warns(rm.RoutingWarning, match=r"RM204.*can be imported"), torch.no_grad():
        for _ in range(3):
            given = net(x)
    expected = outputs(x, net.linear(x))
    assert type(given) is type(expected)
    (record,) = rm.explain(net).models
    assert [row["code"] for row in record["reasons"]] == ["RM204"]


@pytest.mark.parametrize(
    "outputs",
    [lambda x, h: Holder(h), lambda x, h: WithMore(h), lambda x, h: marked(h)],
    ids=["object", "more", "named tuple with more"],
)
def test_what_holds_more_than_its_parts_stays_eager(outputs: Callable[[Any, Any], Any]) -> None:
    net = Net(outputs).eval()
    rm.accelerate(net)
    x = torch.randn(3, 4)
    with pytest.warns(rm.RoutingWarning, match="RM204"), torch.no_grad():
        for _ in range(3):
            given = net(x)
    assert type(given) is type(outputs(x, x)) and vars(given).keys() == vars(outputs(x, x)).keys()


def test_one_tensor_as_several_arguments_is_served() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor, c: Any = None) -> Any:
            return self.linear(a) + b, (a, b, c[0])

    net = Two().eval()
    rm.accelerate(net)
    with torch.no_grad():
        for _ in range(3):
            x, z = torch.randn(3, 4), torch.randn(3, 4)
            y, kept = net(x, x, [x])
            torch.testing.assert_close(y, net.linear(x) + x)
            assert all(k is x for k in kept)
            y, kept = net(x, z, [x])  # two tensors now
            torch.testing.assert_close(y, net.linear(x) + z)
            assert kept[0] is x and kept[1] is z and kept[2] is x
