"""An edit between two calls, of anything that forward reads, is noticed: the next call gives what
eager gives. Each edit of the first table gave the old result once.
"""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import os
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from soundness import Base, X, eager, quiet, routed, same_as_eager
from torch import nn

import rm_abstract as rm


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 3


class Mode(str, enum.Enum):
    PLAIN = "plain"
    DOUBLE = "double"


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Held:
    scale = 2.0


class Holder:
    def __init__(self) -> None:
        self.inside = Held()


package = types.ModuleType("package_of_a_user")
package.sub = types.ModuleType("package_of_a_user.sub")
package.sub.VALUE = 2.0
SLOTTED = Slots()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)
LOCAL = threading.local()
LOCAL.scale = 2.0


def helper(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


class Defaults(Base):
    temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) * self.temperature


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Defaults()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class ReadsByGetattr(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * getattr(self, "k", 1.0)


class ComputesTheName(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale_0 = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * getattr(self, f"scale_{len(x.shape) - 2}")


class CallsMethods(Base):
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @property
    def factor(self) -> float:
        return 2.0

    @staticmethod
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.helper(self.inner(x))) * self.factor


class ReadsAttributes(Base):
    """One attribute of every kind that is no container of Python's own."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype_wanted = torch.float32
        self.size = torch.Size([8])
        self.number = np.float64(2.0)
        self.level = Level.LOW
        self.mode = Mode.PLAIN
        self.phase = complex(2, 0)
        self.raw = b"\x02"
        self.members = {2.0}
        self.fixed = frozenset([2.0])
        self.array = np.full(8, 2.0, np.float32)
        self.table = {"array": np.full(8, 2.0, np.float32)}
        self.queue = deque([2.0])
        self.ordered = OrderedDict(a=2.0, b=3.0)
        self.sign = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).to(self.dtype_wanted).reshape(-1, *self.size)
        y = y * self.number * int(self.level) * self.phase.real * self.raw[0] * self.queue[0]
        y = y + sum(self.members) + sum(self.fixed) + next(iter(self.ordered.values()))
        y = y * float(self.array[0]) * float(self.table["array"][0])
        y = y * (1.0 if self.mode is Mode.PLAIN else 2.0)
        return torch.copysign(y, torch.full((), self.sign))


class ReadsGlobals(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.inner(x)) * package.sub.VALUE * SLOTTED.scale


class ReadsAClassesObject(Base):
    options = Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.options.inside.scale


class CallsTorch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(F.gelu(torch.tanh(self.inner(x))).neg())


def set_class_default(model: Any) -> None:
    model.temperature = 5.0


def set_class_default_of_a_part(model: Any) -> None:
    model.part.temperature = 5.0


def add_an_attribute(model: Any) -> None:
    model.k = 5.0


def add_a_class_attribute(_: Any) -> None:
    ReadsByGetattr.k = 5.0  # type: ignore[attr-defined]


def set_a_computed_name(model: Any) -> None:
    model.scale_0 = 5.0


def put_a_method_on_the_instance(model: Any) -> None:
    model.helper = lambda x: x * 5


def replace_a_method(_: Any) -> None:
    CallsMethods.helper = lambda self, x: x * 5  # type: ignore[method-assign,misc]


def replace_a_property(_: Any) -> None:
    CallsMethods.factor = property(lambda self: 5.0)  # type: ignore[assignment,method-assign]


def replace_a_static_method(_: Any) -> None:
    CallsMethods.add = staticmethod(lambda x: x + 5)  # type: ignore[assignment,method-assign]


def replace_code(_: Any) -> None:
    CallsMethods.helper.__code__ = (lambda self, x: x * 5).__code__


def replace_a_default(_: Any) -> None:
    helper.__defaults__ = (5.0,)


def replace_a_function(_: Any) -> None:
    globals()["helper"] = lambda x: x * 5


def set_in_a_subpackage(_: Any) -> None:
    package.sub.VALUE = 5.0


def set_a_slot(_: Any) -> None:
    SLOTTED.scale = 5.0


def set_in_a_classes_object(model: Any) -> None:
    model.options.inside.scale = 5.0


def set_another_class(model: Any) -> None:
    class Other(Held):
        scale = 5.0

    model.options.inside.__class__ = Other


def patch_relu(_: Any) -> None:
    F.relu = lambda x, inplace=False: x * 5


def patch_gelu(_: Any) -> None:
    F.gelu = lambda x: x * 5


def patch_tanh(_: Any) -> None:
    torch.tanh = lambda x: x * 5


def patch_a_tensor_method(_: Any) -> None:
    torch.Tensor.neg = lambda x: x * 5  # type: ignore[assignment,method-assign]


def setting(name: str, value: Any) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        setattr(model, name, value)

    edit.__name__ = f"set_{name}"
    return edit


def fill_an_array(model: Any) -> None:
    model.array[:] = 5.0


def fill_an_array_in_a_dict(model: Any) -> None:
    model.table["array"][:] = 5.0


def add_to_a_set(model: Any) -> None:
    model.members.add(5.0)


def append_to_a_deque(model: Any) -> None:
    model.queue.appendleft(5.0)


def reorder(model: Any) -> None:
    model.ordered.move_to_end("a")


EDITS: list[tuple[type[nn.Module], Callable[[Any], None]]] = [
    (Defaults, set_class_default),
    (Nested, set_class_default_of_a_part),
    (ReadsByGetattr, add_an_attribute),
    (ReadsByGetattr, add_a_class_attribute),
    (ComputesTheName, set_a_computed_name),
    (CallsMethods, put_a_method_on_the_instance),
    (CallsMethods, replace_a_method),
    (CallsMethods, replace_a_property),
    (CallsMethods, replace_a_static_method),
    (CallsMethods, replace_code),
    (ReadsGlobals, replace_a_default),
    (ReadsGlobals, replace_a_function),
    (ReadsGlobals, set_in_a_subpackage),
    (ReadsGlobals, set_a_slot),
    (ReadsAClassesObject, set_in_a_classes_object),
    (ReadsAClassesObject, set_another_class),
    (CallsTorch, patch_relu),
    (CallsTorch, patch_gelu),
    (CallsTorch, patch_tanh),
    (CallsTorch, patch_a_tensor_method),
    *(
        (ReadsAttributes, edit)
        for edit in (
            setting("dtype_wanted", torch.float64),
            setting("size", torch.Size([2, 4])),
            setting("number", np.float64(5.0)),
            setting("level", Level.HIGH),
            setting("mode", Mode.DOUBLE),
            setting("phase", complex(5, 0)),
            setting("raw", b"\x05"),
            setting("members", {5.0}),
            setting("fixed", frozenset([5.0])),
            setting("array", np.full(8, 5.0, np.float32)),
            setting("sign", -0.0),
            fill_an_array,
            fill_an_array_in_a_dict,
            add_to_a_set,
            append_to_a_deque,
            reorder,
        )
    ),
]


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Puts back what the edits change outside of the model."""
    classes = (Defaults, ReadsByGetattr, CallsMethods, ReadsAClassesObject, Held, torch.Tensor)
    kept = [(kind, dict(vars(kind))) for kind in classes]
    functions = [(F, "relu", F.relu), (F, "gelu", F.gelu), (torch, "tanh", torch.tanh)]
    code, function, defaults = CallsMethods.helper.__code__, helper, helper.__defaults__
    yield
    CallsMethods.helper.__code__ = code
    function.__defaults__ = defaults
    globals()["helper"] = function
    package.sub.VALUE = SLOTTED.scale = 2.0
    ReadsAClassesObject.options = Holder()
    for owner, name, value in functions:
        setattr(owner, name, value)
    for kind, before in kept:
        for name in set(vars(kind)) - set(before):
            if not name.startswith("__"):
                delattr(kind, name)
        for name, value in before.items():
            if vars(kind)[name] is not value and not name.startswith("__"):
                if name == "neg":
                    delattr(kind, name)
                else:
                    setattr(kind, name, value)


@pytest.mark.parametrize(
    ("kind", "edit"), EDITS, ids=[f"{k.__name__}-{e.__name__}" for k, e in EDITS]
)
def test_an_edit_of_what_forward_reads_is_noticed(
    kind: type[nn.Module], edit: Callable[[Any], None]
) -> None:
    model = kind().eval()
    for _ in range(3):
        before = quiet(lambda: model(X))
    assert routed(model) == 2, "without an edit, calls are compiled"
    edit(model)
    expected = eager(lambda: model(X))
    changed = (expected.shape, expected.dtype) != (before.shape, before.dtype)
    assert (
        changed
        or not torch.equal(torch.signbit(expected), torch.signbit(before))
        or (not torch.allclose(expected, before))
    ), "the edit changes the result"
    for _ in range(3):
        now = quiet(lambda: model(X))
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.signbit(now), torch.signbit(expected))


class ReadsTheEnvironment(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(os.environ["RM_TEST_SCALE"])


class ReadsAContextVariable(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * CONTEXT.get()


class ReadsAThreadsVariable(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * LOCAL.scale


class HoldsManyLists(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [[float(i)] for i in range(5000)]
        self.rows[-1][0] = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.rows[-1][0]


class HoldsALongList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.row = [2.0] * 20000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.row[-1]


class HoldsAnObjectOfC(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = (float(i) for i in range(2, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * next(self.generator)


class ReadsOwnDictionary(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * vars(self)["scale"]


def set_the_environment(_: Any) -> None:
    os.environ["RM_TEST_SCALE"] = "5"


def set_context(_: Any) -> None:
    CONTEXT.set(5.0)


def set_threads_variable(_: Any) -> None:
    LOCAL.scale = 5.0


def set_a_far_list(model: Any) -> None:
    model.rows[-1][0] = 5.0


def set_a_far_item(model: Any) -> None:
    model.row[-1] = 5.0


def nothing(_: Any) -> None:
    pass


def set_scale(model: Any) -> None:
    model.scale = 5.0


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        (ReadsTheEnvironment, set_the_environment),
        (ReadsAContextVariable, set_context),
        (ReadsAThreadsVariable, set_threads_variable),
        (HoldsManyLists, set_a_far_list),
        (HoldsALongList, set_a_far_item),
        (HoldsAnObjectOfC, nothing),
        (ReadsOwnDictionary, set_scale),
    ],
    ids=lambda v: v.__name__,
)
def test_what_cannot_be_watched_is_never_taken_for_unchanged(
    kind: type[nn.Module], edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_TEST_SCALE", "2")
    CONTEXT.set(2.0)
    LOCAL.scale = 2.0
    torch.manual_seed(0)
    model = kind().eval()
    torch.manual_seed(0)
    plain = kind().eval()
    for step in range(6):
        if step == 3:
            edit(model)
            edit(plain)
        expected = eager(lambda: plain(X))
        torch.testing.assert_close(quiet(lambda: model(X)), expected, rtol=1e-4, atol=1e-4)


def test_a_reason_names_what_cannot_be_watched() -> None:
    model = HoldsAnObjectOfC().eval()
    with pytest.warns(Warning, match=r"RM210.*generator"), torch.no_grad():
        model(X)


def test_an_attribute_that_forward_never_reads_may_be_anything() -> None:
    model = Defaults().eval()
    model.notes = (i for i in range(3))
    model.lock = threading.Lock()
    for _ in range(3):
        same_as_eager(model, X)
    model.remark = "new"
    same_as_eager(model, X)
    assert routed(model) == 3


def test_a_module_of_sys_prefix_beside_the_environment_is_the_users(tmp_path: Any) -> None:
    from rm_abstract.guards.packages import installed

    assert not installed(os.path.join(sys.prefix, "my_model.py"))
    assert not installed(os.path.join(sys.prefix, "app", "my_model.py"))
    assert installed(torch.__file__)
    assert installed(os.__file__)


@pytest.mark.parametrize("holder", ["object", "submodule"])
def test_a_dict_put_in_the_place_of_an_objects_own_is_noticed(holder: str) -> None:
    class Box:
        def __init__(self, v: float) -> None:
            self.v = v

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.v

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.box, self.scale = nn.Linear(8, 8), Box(2.0), Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(self.l(x)) * self.box.v

    rm.init("cpu")
    try:
        model, x = Model().eval(), torch.ones(2, 8)
        with torch.no_grad():
            for _ in range(3):
                model(x)
            edited: Any = model.box if holder == "object" else model.scale
            edited.__dict__ = {**vars(edited), "v": 3.0}
            ours = model(x)
            with rm.disabled():
                torch.testing.assert_close(ours, model(x))
    finally:
        rm.shutdown()
