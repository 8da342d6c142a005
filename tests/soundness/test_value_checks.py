"""What eager checks of values is not lost: compiled calls raise eager's own error (0233)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from soundness import quiet, report, routed
from torch import nn

import rm_abstract as rm

HUGE = 2**40
LOWEST = -(2**63)


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.one_hot(x.long(), 5).float())


class Routed(nn.Module):
    """Classes that cannot be outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        best = F.one_hot(y.topk(2, -1).indices, 5).sum(-2)
        last = F.one_hot(x.long().clamp(0, 4), 5).sum(-2)
        return y * best + F.one_hot(y.argmax(-1), 5) + last


class Checking(nn.Module):
    """A linear layer behind `check`, which looks at its input."""

    def __init__(self, check: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.check = check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        return self.inner(x)


def small(x: torch.Tensor) -> None:
    torch._assert_async((x < 9).all(), "too large")


def small_unsaid(x: torch.Tensor) -> None:
    torch._assert_async((x < 9).all())


def small_everywhere(x: torch.Tensor) -> None:
    torch._check_tensor_all(x < 9, lambda: "too large somewhere")


def few_large(x: torch.Tensor) -> None:
    torch._check((x > 9).sum().item() < x.shape[0], lambda: "too many")


def few_chosen(x: torch.Tensor) -> None:
    torch._check(x[x > 9].numel() < x.shape[0], lambda: "too many chosen")


def few_places(x: torch.Tensor) -> None:
    torch._check((x > 9).nonzero().shape[0] < x.shape[0], lambda: "too many places")


def behind_a_write(x: torch.Tensor) -> None:
    copied = x.clone()
    copied += 1
    torch._assert_async((copied < 10).all())


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return quiet(call)
    except Exception as error:  # whatever eager raises
        return error


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Exception):
        assert type(got) is type(wanted), got
        assert str(got).splitlines()[0] == str(wanted).splitlines()[0]
        return
    assert not isinstance(got, Exception), got
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def judged(model: nn.Module, *args: Any) -> Any:
    """Calls it with and without us. Gives eager's outcome."""
    with rm.disabled():
        wanted = outcome(lambda: model(*args))
    same(outcome(lambda: model(*args)), wanted)
    return wanted


def raises(model: nn.Module, *args: Any) -> None:
    assert isinstance(judged(model, *args), Exception)


def serves(model: nn.Module, *args: Any) -> None:
    before = routed(model)
    assert not isinstance(judged(model, *args), Exception)
    assert routed(model) == before + 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, 5, HUGE, LOWEST])
def test_one_hot_refuses_classes_outside_before_and_after_it_was_served(
    bad: int, dtype: torch.dtype
) -> None:
    if dtype is torch.int32 and abs(bad) > 5:
        bad = -(2**31)
    model = OneHot().eval()
    good, wrong = ints(0, 1, 4, dtype=dtype), ints(0, bad, 4, dtype=dtype)
    raises(model, wrong)
    for _ in range(3):
        judged(model, good)
    for _ in range(2):
        serves(model, good)
        raises(model, wrong)
        raises(model, ints(bad, 1, 2, 3, dtype=dtype))
        serves(model, good)
    assert "RM120" in [reason["code"] for reason in report(model)["reasons"]]


def test_one_hot_takes_no_classes_at_all() -> None:
    model = OneHot().eval()
    for _ in range(4):
        judged(model, ints(1, 2))
        judged(model, ints())
    raises(model, ints(5))
    serves(model, ints())


def test_classes_that_are_proven_cost_no_check() -> None:
    model = Routed().eval()
    for _ in range(4):
        judged(model, torch.randn(3, 8))
    serves(model, torch.randn(3, 8))
    (entry,) = report(model)["entries"]
    assert not [kernel for kernel in entry["kernels"] if "check" in kernel]


@pytest.mark.parametrize(
    "check",
    [small, small_unsaid, small_everywhere, few_large, few_chosen, few_places, behind_a_write],
)
def test_a_check_of_the_users_is_made(check: Callable[[torch.Tensor], Any]) -> None:
    model = Checking(check).eval()
    good, wrong = torch.zeros(3, 5), torch.full((3, 5), 10.0)
    for _ in range(4):
        judged(model, good)
    for _ in range(2):
        serves(model, good)
        raises(model, wrong)
        raises(model, torch.full((7, 5), 10.0))


@pytest.mark.parametrize(
    ("call", "good", "wrong"),
    [
        (lambda x, i: x.index_select(1, i), ints(0, 3), ints(0, -1)),
        (lambda x, i: x.index_select(1, i), ints(0, 3), ints(0, 5)),
        (
            lambda x, p: F.binary_cross_entropy(p, x.sigmoid()),
            torch.full((3, 5), 0.5),
            torch.ones(3, 5) * 2,
        ),
        (
            lambda x, p: F.binary_cross_entropy(x.sigmoid(), p),
            torch.full((3, 5), 0.5),
            -torch.ones(3, 5),
        ),
        (
            lambda x, p: F.binary_cross_entropy(p, x.sigmoid()),
            torch.full((3, 5), 0.5),
            torch.full((3, 5), torch.nan),
        ),
        (lambda x, t: F.cross_entropy(x, t), ints(0, 4, -100), ints(0, 5, 1)),
        (lambda x, i: x.sum() + i // i.flip(0), ints(1, 2), ints(0, 2)),
    ],
)
def test_what_operators_check_is_checked(
    call: Callable[..., torch.Tensor], good: torch.Tensor, wrong: torch.Tensor
) -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return call(self.inner(x), given)

    model, x = Calling().eval(), torch.randn(3, 5)
    for _ in range(4):
        judged(model, x, good)
    for _ in range(2):
        serves(model, x, good)
        raises(model, x, wrong)


def test_a_mask_that_must_count_what_is_put_in_its_place() -> None:
    class Placing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor, put: torch.Tensor) -> torch.Tensor:
            mask = (x > 9).all(-1, keepdim=True).expand_as(x)
            torch._check(x[mask].numel() == put.numel(), lambda: "another number")
            return self.inner(x.masked_scatter(mask, put))

    model = Placing().eval()
    x = torch.randn(4, 5)
    x[1:3] = 10
    for _ in range(4):
        judged(model, x, torch.randn(2, 5))
    serves(model, x, torch.randn(2, 5))
    for rows in (1, 3):
        raises(model, x, torch.randn(rows, 5))
    raises(model, torch.randn(4, 5), torch.randn(2, 5))
    serves(model, x, torch.randn(2, 5))


def test_every_thread_gets_the_error_of_its_own_call() -> None:
    model = OneHot().eval()
    for _ in range(5):
        judged(model, ints(0, 1, 4))
    with rm.disabled(), torch.no_grad():
        wanted = model(ints(0, 1, 4))
    failed: list[Any] = []

    def work(number: int) -> None:
        for turn in range(200):
            wrong = (number + turn) % 2 == 0
            got = outcome(lambda: model(ints(0, 5 if wrong else 1, 4)))  # noqa: B023
            ok = isinstance(got, RuntimeError) if wrong else torch.is_tensor(got)
            if not ok or (not wrong and not torch.allclose(got, wanted, atol=1e-4)):
                failed.append((number, turn, got))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[:3]


@pytest.mark.parametrize("kind", ["one_hot", "assert"])
def test_a_training_step_that_is_refused_leaves_everything_as_eager_does(kind: str) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "one_hot":
                return self.norm(self.inner(F.one_hot(x, 5).float()))
            y = self.drop(self.norm(self.inner(x)))
            torch._assert_async((x < 9).all(), "too large")
            return y

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    good = ints(0, 1, 4) if kind == "one_hot" else torch.randn(3, 5)
    wrong = ints(0, 5, 4) if kind == "one_hot" else torch.full((3, 5), 10.0)
    target, found = torch.randn(3, 4), []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = Trained().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = rm.compile_step(model, loss, optimizer)
        for batch in (good, good, good, wrong, good):
            before = {n: p.clone() for n, p in model.named_parameters()}
            got = None
            with nullcontext() if compiled else rm.disabled(), warnings.catch_warnings():
                warnings.simplefilter("ignore", rm.RoutingWarning)
                try:
                    step(batch, target)
                except RuntimeError as error:
                    got = error
            assert isinstance(got, Exception) == (batch is wrong)
            if batch is wrong:
                for name, p in model.named_parameters():
                    assert torch.equal(p, before[name]), name
        found.append(model.state_dict())
        if compiled:
            assert step.report()["compiled"] > 1
    if kind == "one_hot":  # without random numbers
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


SECOND = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
import rm_abstract as rm

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 4)
    def forward(self, x):
        torch._assert_async((x != 3).all(), "three")
        return self.inner(F.one_hot(x, 5).float())

rm.init("cpu")
torch.manual_seed(0)
model, found = Model().eval(), []
with torch.no_grad():
    for values in ([0, 1, 4],) * 4 + ([0, 5, 1], [0, 3, 1], [-1, 0, 0], [2, 2, 2]):
        try:
            found.append(list(model(torch.tensor(values)).shape))
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
(entry,) = rm.explain(model).to_dict()["models"][0]["entries"]
print(json.dumps([found, entry["cache"], entry["calls"]]))
"""


def test_a_second_process_refuses_what_the_first_one_did(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SECOND)
    environment = {**os.environ, "RM_CACHE_DIR": str(tmp_path / "cache")}
    for cache in ("miss", "hit"):
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        found, source, calls = json.loads(done.stdout.splitlines()[-1])
        assert source == cache and calls >= 3
        assert found[:4] == [[3, 4]] * 4 and found[7] == [3, 4]
        assert "smaller than num_classes" in found[4]
        assert "three" in found[5]
        assert "non-negative" in found[6]
